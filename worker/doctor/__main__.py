"""Runs one check: `python -m oobleck.worker.doctor CHECK DEVICE...`.

DEVICE: cpu, or cuda:N. Prints a `Finding` as a line of JSON for all that it sees. Whoever runs it
gives it a time-out, since a call of a sick GPU may never return.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from oobleck.host.finding import Finding
from oobleck.worker.doctor import single, together

Check = Callable[[Sequence[str]], Iterator[Finding]]
CHECKS: Mapping[str, Check] = {
    "forks": single.forks,
    "memory": single.memory,
    "killed": single.killed,
    "products": single.products,
    "copies": single.copies,
    "waits": single.waits,
    "peers": together.peers,
    "sums": together.sums,
    "aborts": together.aborts,
}


def main() -> None:
    name, *devices = sys.argv[1:]
    if name == "member":
        return together.member(devices)
    for finding in CHECKS[name](devices):
        sys.stdout.write(msgspec.json.encode(finding).decode() + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()

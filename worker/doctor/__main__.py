"""Runs one check: `python -m oobleck.worker.doctor CHECK DEVICE...`.

DEVICE: cpu, or cuda:N. Prints a `Finding` as a line of JSON for all that it sees. Whoever runs it
gives it a time-out, since a call of a sick GPU may never return.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from oobleck.core.finding import Finding
from oobleck.worker.doctor import (
    block,
    engine,
    jobs,
    lone,
    recoveries,
    replicas,
    single,
    together,
)
from oobleck.worker.doctor.pair import Task, member

Check = Callable[[Sequence[str]], Iterator[Finding]]
CHECKS: Mapping[str, Check] = {
    "forks": single.forks,
    "memory": single.memory,
    "killed": single.killed,
    "products": single.products,
    "copies": single.copies,
    "waits": single.waits,
    "backwards": engine.backwards,
    "syncs": engine.syncs,
    "errors": engine.errors,
    "block": block.block,
    "lone": lone.lone,
    "peers": together.peers,
    "sums": together.sums,
    "aborts": together.aborts,
    "groups": replicas.groups,
    "replicas": replicas.replicas,
    "messages": recoveries.messages,
    "ends": recoveries.ends,
    "recoveries": recoveries.recoveries,
    "kills": jobs.kills,
    "speed": jobs.speed,
}
#: Of two processes.
TASKS: Mapping[str, Task] = {
    "sum": together.sum_of_two,
    "lost": together.lose,
    "groups": replicas.connect_many,
    "replicas": replicas.train_alike,
    "ddp": replicas.train_by_ddp,
    **recoveries.TASKS,
}


def main() -> None:
    name, *devices = sys.argv[1:]
    if name == "member":
        return member(devices, TASKS)
    for finding in CHECKS[name](devices):
        sys.stdout.write(msgspec.json.encode(finding).decode() + "\n")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()

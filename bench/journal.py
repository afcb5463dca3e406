"""Cost of a master's restart after a long life: replaying a journal of many events.

    python -m bench.journal [--events 1000000] [--nodes 1000]

Nodes are lost and register again, in turns, in a state directory of its own, journaled and applied
as the master does it; then another process starts on what is there. Compaction is meant to bound
the file, and with it the time and the memory of the start.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.support.scratch import run_folder
from oobleck.core.ids import Incarnation, NodeName
from oobleck.host.detection import Detection
from oobleck.host.system.environment import Environment
from oobleck.master.config import MasterConfig
from oobleck.master.events.nodes import NodeLost, NodeRegistered
from oobleck.master.storage.journal import Journal
from oobleck.master.storage.ledger import Ledger
from oobleck.proto.types import NodeFacts

#: Events per commit, as in one iteration of the master.
_PER_COMMIT = 10


def open_ledger(state_dir: Path) -> Ledger:
    config = MasterConfig(listen="127.0.0.1:0", state_dir=state_dir, timing=Detection())
    return Ledger(config, Journal(state_dir / "journal.log"), Environment())


def registered(number: int, life: int) -> NodeRegistered:
    name = NodeName(f"n{number:04}")
    facts = NodeFacts(
        node=name,
        incarnation=Incarnation(f"{life:016x}"),
        hostname=name,
        address="10.0.0.1",
        pid=1,
        worker_slots=8,
        device="cuda",
        memory_per_worker_bytes=80 << 30,
    )
    return NodeRegistered(facts=facts)


def live(state_dir: Path, events: int, nodes: int) -> None:
    ledger = open_ledger(state_dir)
    journal = state_dir / "journal.log"
    largest, begun = 0, time.process_time()
    for number in range(events):
        node, life = number // 2 % nodes, number // 2 // nodes
        if number % 2 == 0:
            ledger.journal(registered(node, life))
        else:
            name = NodeName(f"n{node:04}")
            incarnation = Incarnation(f"{life:016x}")
            reason = "not heard of for 4.0 s (the lease is 4 s)"
            ledger.journal(
                NodeLost(
                    node=name, incarnation=incarnation, cause="lease", reason=reason, detect_s=4.0
                )
            )
        if number % _PER_COMMIT == 0:
            ledger.commit()
            largest = max(largest, journal.stat().st_size)
            ledger.compact()
    ledger.commit()
    each_ms = (time.process_time() - begun) * 1e3 / events
    print(
        f"{events} events of {nodes} nodes: {each_ms:.3f} ms of a core each; the journal had "
        f"{largest / 2**20:.1f} MiB at most, {journal.stat().st_size / 2**20:.1f} in the end"
    )


def start(state_dir: Path) -> None:
    begun, before = time.perf_counter(), time.process_time()
    ledger = open_ledger(state_dir)
    wall, processor = time.perf_counter() - begun, time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"the next start reads it in {wall:.2f} s ({processor:.2f} s of a core), {peak:.0f} MiB at "
        f"most; {len(ledger.state.nodes)} nodes, event {ledger.state.sequence}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start is not None:
        start(arguments.start)
        return
    with run_folder() as folder:
        live(folder, arguments.events, arguments.nodes)
        command = [sys.executable, "-m", "bench.journal", "--start", str(folder)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

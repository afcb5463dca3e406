"""How long training stands still when the head is lost.

    python -m bench.head_lost [--away 10] [--nodes 3] [--rounds 3]

A real cluster trains a job of many short steps. The master is killed (SIGKILL). After `--away`
seconds the next head begins in one of the ways of docs/deploy/head-lost.md:

- `process`: on the same state directory.
- `restore`: on another one, from a backup that was made before.
- `adopt`: on an empty one; `oobleck adopt` takes the job over.

Prints, from the times in the steps' records:

- `median`: median time between two steps in the `--away` seconds before the loss,
- `longest`: the longest such time,
- `without`: the longest time between two steps while there was no head,
- `since`: the longest from the next head's start until `--away` seconds after it has the job.

Training stood still if one of the last two is much longer than `longest`. The workers must be the
same processes throughout.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

from bench.support.scratch import run_folder
from bench.support.separate import Daemons

WAYS = ("process", "restore", "adopt")
_SETTLE_STEPS = 20
#: Time for which the next head waits for records that may be lost.
_RECORDS_S = 120.0


def job() -> dict[str, object]:
    return {
        "name": "head",
        "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": 1_000_000, "global_batch": 16, "microbatch": 2},
        "fault_tolerance": 1,
        "profile": "estimate",
    }


def go_on(cluster: Daemons, way: str, job_id: str, backup: Path) -> None:
    """Have a head go on, and return when it has the job."""
    if way != "process":
        cluster.state_dir = cluster.state_dir.with_name(way)
    cluster.start_master(*(("--restore", str(backup)) if way == "restore" else ()))
    if way == "adopt":
        cluster.wait(
            lambda: (
                all(node["state"] == "held" for node in cluster.nodes().values())
                and len(cluster.nodes()) == len(cluster.agents)
            ),
            "all nodes held",
        )
        cluster.oobleck("adopt", job_id)
    cluster.wait(lambda: cluster.live() == set(cluster.agents), "all nodes")


def lose_head(way: str, away_s: float, nodes: int) -> tuple[float, float, float, float]:
    """Lose the head once. Returns the median of a step, and the longest span between two steps
    before, while no head was there, and since, in seconds."""
    with run_folder() as scratch:
        cluster = Daemons(scratch / "cluster")
        try:
            cluster.start_master()
            for number in range(1, nodes + 1):
                cluster.start_node(f"n{number}")
            cluster.wait(lambda: len(cluster.live()) == nodes, "all nodes")
            job_id = cluster.submit(job())
            cluster.wait_step(job_id, _SETTLE_STEPS)
            backup = scratch / "backup"
            cluster.oobleck("backup", str(backup))
            workers, began = cluster.worker_pids(), time.time()
            time.sleep(away_s)
            lost = time.time()
            cluster.kill_master()
            times = {record["step"]: record["time"] for record in cluster.metrics(job_id)}
            time.sleep(away_s)
            back = time.time()
            go_on(cluster, way, job_id, backup)
            over = time.time() + away_s
            cluster.wait(
                lambda: any(r["time"] > over for r in cluster.metrics(job_id)[-1:]),
                "the records of then",
                away_s + _RECORDS_S,
                poll_s=1.0,
            )
            if cluster.worker_pids() != workers:
                raise SystemExit(f"{way}: workers were started anew")
            # Two heads may have a step's record from different workers, with different times: keep
            # the first.
            times = {r["step"]: r["time"] for r in cluster.metrics(job_id)} | times
        finally:
            cluster.close()
    spans = [(one, two - one) for one, two in pairwise(sorted(times.values()))]
    calm = [span for at, span in spans if began <= at and at + span < lost]
    without = [span for at, span in spans if at + span >= lost and at < back]
    since = [span for at, span in spans if back <= at < over]
    return statistics.median(calm), max(calm), max(without), max(since)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--away", type=float, default=10.0, help="seconds without a head")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{given.nodes} nodes, {given.away:g} s without a head; ms from one step to the next")
    print(f"{'the next head':>14} {'median':>8} {'longest':>8} {'without':>8} {'since':>8}")
    for way in WAYS:
        for _ in range(given.rounds):
            found = lose_head(way, given.away, given.nodes)
            print(f"{way:>14} " + " ".join(f"{1000 * span:8.1f}" for span in found), flush=True)


if __name__ == "__main__":
    main()

"""What `oobleck doctor` costs a job that trains meanwhile: how long its steps take.

    python -m bench.examined [--nodes 4] [--rounds 6] [--pairs]

A local cluster trains; its steps are timed in turn while a doctor looks at all nodes, five times
one right after the other, and for as long alone. All of that shares the cores of this machine, so
what a host of its own would notice is less. Printed: medians and 90th percentiles of the steps in
both, and how long a look takes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.support.cluster import LocalCluster
from bench.throughput import TEXT
from oobleck.cli.cluster.doctor import Question, of_cluster

WARM_UP_STEPS = 20
#: Examinations per round.
_LOOKS = 5


def job(nodes: int) -> dict[str, object]:
    return {
        "name": "examined",
        "model": {"layers": 4, "hidden": 64, "heads": 2, "sequence_length": 64},
        "data": {"text": [TEXT]},
        "training": {"steps": 1_000_000, "global_batch": 4 * nodes, "microbatch": 2},
        "fault_tolerance": 1,
        "profile": "estimate",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pairs", action="store_true")
    options = parser.parse_args(arguments)
    alone: list[float] = []
    beside: list[float] = []
    looks: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(options.nodes, state_dir=Path(folder) / "state") as cluster,
    ):
        job_id = cluster.submit(job(options.nodes))
        cluster.wait_step(job_id, WARM_UP_STEPS)

        def steps_of(begin: int) -> list[float]:
            """Return the durations of the steps since `begin`, except the last, which may belong to
            both parts."""
            last = cluster.last_step(job_id)
            return [
                line["step_seconds"]
                for line in cluster.metrics(job_id)
                if begin < line["step"] < last
            ]

        for _ in range(options.rounds):
            begin, round_began = cluster.last_step(job_id) + 1, time.monotonic()
            for _ in range(_LOOKS):
                began = time.monotonic()
                found = list(of_cluster(cluster.endpoint, Question(pairs=options.pairs)))
                looks.append(time.monotonic() - began)
                assert not [finding for finding in found if finding.level == "fail"], found
            beside += steps_of(begin)
            begin, took_s = cluster.last_step(job_id) + 1, time.monotonic() - round_began
            time.sleep(took_s)
            alone += steps_of(begin)
        reconfigured = len(cluster.events(job_id, "reconfigured"))
        cluster.oobleck("cancel", job_id)
        cluster.wait_end(job_id)
    for name, steps in (("alone", alone), ("beside a doctor", beside)):
        steps.sort()
        tail = steps[int(0.9 * len(steps))]
        median = statistics.median(steps)
        print(f"{name}: {len(steps)} steps, median {median:.4f} s, 90 % within {tail:.4f} s")
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"a step takes {100 * (ratio - 1):+.1f} %; a look {statistics.median(looks):.1f} s")
    print(f"reconfigurations: {reconfigured}")


if __name__ == "__main__":
    main()

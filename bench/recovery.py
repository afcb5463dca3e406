"""How long training stands still when a node is killed, by phase.

    python -m bench.recovery [--kills 7] [--nodes 5]

Kills a whole node (agent and worker, SIGKILL) of a running local cluster again and again, each
time waiting until the node is back in. The clock runs from just before the signal to the commit
of the next step; phases are those of the `reconfigured` record, and `notice` is what lies between
the signal and the master's first evidence. `rest` is what the sum of all misses of the wall time:
the way of the step's record from a worker to the master, and clock noise.
"""

import argparse
import statistics
import time
from pathlib import Path

from bench.cluster import LocalCluster, Record

PHASES = ("notice", "detect", "plan", "abort", "rendezvous", "transfer", "first_step")
COLUMNS = (*PHASES, "rest", "wall", "step", "beyond")
WARM_UP_STEPS = 10
#: Steps between two disturbances, so that the next one meets a settled cluster.
SETTLE_STEPS = 8


def job(steps: int) -> dict[str, object]:
    return {
        "name": "recovery",
        "model": {"layers": 6, "hidden": 64, "heads": 4, "sequence_length": 64},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": steps, "global_batch": 32, "microbatch": 2},
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
    }


def one_kill(cluster: LocalCluster, job_id: str, victim: str) -> dict[str, float]:
    """Kill `victim`, let it come back; returns the seconds of each phase and the totals."""
    cluster.wait_step(job_id, cluster.last_step(job_id) + SETTLE_STEPS)
    before = len(cluster.events(job_id, "reconfigured"))
    steps = [float(r["step_seconds"]) for r in cluster.metrics(job_id)[-SETTLE_STEPS:]]
    killed_at = time.time()
    cluster.kill_node(victim)

    def records(count: int) -> list[Record]:
        return cluster.events(job_id, "reconfigured")[before : before + count]

    cluster.wait(lambda: len(records(1)) == 1, f"the recovery from the loss of {victim}")
    record = records(1)[0]
    first = next(
        r for r in cluster.metrics(job_id) if int(r["generation"]) >= record["to_generation"]
    )
    wall = float(first["time"]) - killed_at
    declared = cluster.events(job_id, "node_lost")[-1]
    notice = float(declared["time"]) - float(declared["detect_s"]) - killed_at
    phases = {name: float(seconds) for name, seconds in record["phases"].items()}
    cluster.start_node(victim)
    cluster.wait(lambda: len(records(2)) == 2, f"the return of {victim}")
    return {
        "notice": notice,
        **phases,
        "rest": wall - notice - sum(phases.values()),
        "wall": wall,
        "step": statistics.median(steps),
        "beyond": wall - statistics.median(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=5)
    arguments = parser.parse_args()
    results = []
    with LocalCluster(arguments.nodes) as cluster:
        job_id = cluster.submit(job(steps=100_000))
        cluster.wait_step(job_id, WARM_UP_STEPS)
        header = "  ".join(f"{name:>10}" for name in COLUMNS)
        print(f"{'kill':<12}{header}   (milliseconds)")
        for number in range(arguments.kills):
            victim = f"n{number % arguments.nodes + 1}"
            result = one_kill(cluster, job_id, victim)
            results.append(result)
            print_row(f"{number + 1} {victim}", result)
    print_row("median", {key: statistics.median(r[key] for r in results) for key in COLUMNS})
    print("beyond: wall less one undisturbed step (the one that is done again)")


def print_row(title: str, result: dict[str, float]) -> None:
    print(f"{title:<12}" + "  ".join(f"{result[key] * 1e3:>10.0f}" for key in COLUMNS), flush=True)


if __name__ == "__main__":
    main()

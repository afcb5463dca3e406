"""What a checkpoint costs training.

    python -m bench.checkpoint [--nodes 2] [--every 20] [--saves 12] [--hidden 256] [--layers 8]

Trains one job on a local cluster with a checkpoint every so many steps, and compares steps with
steps of the same run: those of the second half of each interval, in which nothing is saved, are the
baseline. `at` is the step at whose end a thread begins to copy, `+1` the one whose update waits for
that copy; the others run while the thread hashes and writes. `per save` is what all steps of an
interval take beyond the baseline, and `amortised` that over the default interval of 100 steps.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from bench.support.cluster import LocalCluster

#: Steps after a save that are shown one by one.
SHOWN = 4
DEFAULT_EVERY = 100


def job(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "name": "checkpoint",
        "model": {
            "layers": arguments.layers,
            "hidden": arguments.hidden,
            "heads": 4,
            "sequence_length": 64,
        },
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {
            "steps": arguments.every * (arguments.saves + 1),
            "global_batch": 8,
            "microbatch": 2,
        },
        "fault_tolerance": 0 if arguments.nodes == 1 else 1,
        "profile": "estimate",
        "checkpoint": {"path": str(path), "every": arguments.every, "keep": 1, "at_end": False},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    every = arguments.every
    with tempfile.TemporaryDirectory() as directory, LocalCluster(arguments.nodes) as cluster:
        job_id = cluster.submit(job(Path(directory), arguments))
        state = cluster.wait_end(job_id, timeout_s=1800)
        if state != "succeeded":
            raise SystemExit(f"the job has {state}: {cluster.end_of(job_id)}")
        saved = cluster.events(job_id, "checkpoint_saved")
        seconds = {int(r["step"]): float(r["step_seconds"]) for r in cluster.metrics(job_id)}
    intervals = [
        [seconds[start + offset] for offset in range(every)]
        for start in range(every, every * (arguments.saves + 1), every)
    ]
    report(intervals, saved, every)


def report(intervals: list[list[float]], saved: list[dict[str, object]], every: int) -> None:
    baseline = statistics.median(s for steps in intervals for s in steps[every // 2 :])
    print(f"{len(saved)} checkpoints of {int(str(saved[-1]['bytes'])) / 1e6:.1f} MB", end="; ")
    published = statistics.median(float(str(record["seconds"])) for record in saved)
    print(f"published after {published * 1e3:.0f} ms (median)")
    print(f"step without a save   {baseline * 1e3:8.1f} ms (median)")
    for offset in range(min(SHOWN, every // 2)):
        beyond = statistics.median(steps[offset] for steps in intervals) - baseline
        name = "at" if offset == 0 else f"+{offset}"
        print(f"step {name:<3} beyond it    {beyond * 1e3:8.1f} ms (median)")
    # Compare the first half of each interval with its second half: the machine's load changes.
    costs = [
        sum(steps[: every // 2]) - every // 2 * statistics.mean(steps[every // 2 :])
        for steps in intervals
    ]
    cost = statistics.median(costs)
    print(f"per save              {cost * 1e3:8.1f} ms (median)")
    print(f"amortised over {DEFAULT_EVERY:<4}   {cost / (DEFAULT_EVERY * baseline):8.2%}")


if __name__ == "__main__":
    main()

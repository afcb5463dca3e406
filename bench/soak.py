"""A long run under random faults: how much of the time goes into useful steps.

    python -m bench.soak [--mtbf 60] [--minutes 10] [--nodes 4] [--seed 0] [--compound 0]

Faults of `bench.support.faults` strike random nodes of a cluster in network namespaces (needs root)
at exponential intervals, as failures of machines come; with `--compound 0.3` three in ten strike
while the job recovers from another one. Prints each fault and what it cost, then the share of the
time that went into steps that count, and where the rest of it went (`bench.support.goodput`).
`tests/fault/test_soak.py` strikes without pauses, and holds the losses against one process.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.support.drill import Drill, Struck, Use
from bench.support.faults import FAULTS
from bench.support.goodput import Span, report
from bench.support.netcluster import NetCluster
from bench.support.network import unusable

#: Longest delay of a fault that strikes during the recovery from another one.
_SOON_S = 0.4


def job(checkpoints: Path) -> dict[str, object]:
    return {
        "name": "soak",
        "model": {"layers": 6, "hidden": 64, "heads": 4, "sequence_length": 64},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": 10_000_000, "global_batch": 32, "microbatch": 2},
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "checkpoint": {"path": str(checkpoints), "every": 100, "at_end": False},
        "profile": "estimate",
    }


class Soak:
    """Random faults on one running job."""

    def __init__(self, drill: Drill, seed: int, compound: float) -> None:
        """`compound`: the share of faults that strike in the recovery from another one."""
        print(f"seed {seed}", flush=True)
        self._drill = drill
        self._draw = random.Random(seed)
        self._share = compound
        #: Number of faults so far that struck during a recovery.
        self.compound = 0
        # Two losses at once may be one more than the plan survives.
        self._have_checkpoint()

    def _have_checkpoint(self) -> None:
        cluster, job_id = self._drill.cluster, self._drill.job_id
        cluster.save(job_id)
        cluster.wait(
            lambda: bool(cluster.events(job_id, "checkpoint_saved")), "a checkpoint", poll_s=0.1
        )

    def strike(self) -> Struck:
        """Strike once at random, sometimes during a recovery, and wait until the cluster is whole
        again."""
        draw, cluster = self._draw, self._drill.cluster
        fault = FAULTS[draw.choice(sorted(FAULTS))]
        node, other = draw.sample(sorted(self._drill.nodes), 2)
        if draw.random() >= self._share:
            return self._drill.strike(fault, node)
        self.compound += 1
        FAULTS["kill-worker"].strike(cluster, other)
        time.sleep(draw.uniform(0, _SOON_S))  # not a wait: the moment of a failure
        return self._drill.strike(fault, node, phase=f"recovery of {other}")


def intervals(draw: random.Random, mtbf_s: float, for_s: float) -> Iterator[float]:
    """Yield the times of failures, in seconds from the begin."""
    at_s = draw.expovariate(1 / mtbf_s)
    while at_s < for_s:
        yield at_s
        at_s += draw.expovariate(1 / mtbf_s)


def tell(struck: Struck) -> None:
    where = "" if struck.phase == "step" else f" in the {struck.phase}"
    print(
        f"step {struck.step:>6}  {struck.fault:<12} {struck.node}{where}: "
        f"seen after {struck.seen_s:.1f} s, whole after {struck.whole_s:.1f} s, "
        f"lost {struck.cost.lost:.1f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mtbf", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compound", type=float, default=0.0, help="share in others' recoveries")
    chosen = parser.parse_args(arguments)
    if reason := unusable():
        raise SystemExit(reason)
    draw = random.Random(chosen.seed)
    with NetCluster(chosen.nodes) as cluster:
        drill = Drill(cluster, job(cluster.state_dir / "saved"))
        drill.settle("at the start")
        soak = Soak(drill, chosen.seed, chosen.compound)
        quiet = Span(cluster, drill.job_id)
        cluster.wait_step(drill.job_id, cluster.last_step(drill.job_id) + 100)
        undisturbed, before = quiet.cost(), Use.of(cluster)
        print(f"undisturbed: {undisturbed.useful_s / undisturbed.span_s:.1%} of the time in steps")
        span, begin = Span(cluster, drill.job_id), time.monotonic()
        for at_s in intervals(draw, chosen.mtbf, 60 * chosen.minutes):
            time.sleep(max(0.0, begin + at_s - time.monotonic()))
            tell(soak.strike())
        time.sleep(max(0.0, begin + 60 * chosen.minutes - time.monotonic()))
        faults = [(struck.fault, struck.cost) for struck in drill.struck]
        print(f"{len(faults)} faults, {soak.compound} of them in recoveries of others")
        step_s = undisturbed.span_s / undisturbed.steps
        print("\n".join(report(span.cost(), faults, step_s)))
        for line in Use.of(cluster).grown(before, descriptors=10, megabytes=30):
            print(f"grown: {line}")


if __name__ == "__main__":
    main()

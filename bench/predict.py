"""Predicted against measured: the estimated step of a plan, and what the step really takes.

    python -m bench.predict [--steps 12] [--repeats 3] [--only NAME]

For each case a fresh local cluster measures the model, plans from that, and trains; the plan that
it made is estimated with the very profile that it was made by, and compared with the median of the
steps after a few to warm up. That is done several times, and the run stands for the case in which
other processes took least of the machine (`others`, a share of all cores): their load strikes
sometimes the measurement and sometimes the training.

Where there are more workers than cores, workers share them, and the estimate, which knows nothing
of that, sees it only in the profile: that is measured with all workers computing at once, while in
a pipeline some of them wait.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.support.client import Record
from bench.support.cluster import LocalCluster
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import Profile, parse_profile
from oobleck.core.routes import Hold
from oobleck.planner.cost.estimate import estimate_step

WARM_UP_STEPS = 3
TEXT = str(Path(__file__).resolve().parents[1] / "LICENSE")
WIDE = {"layers": 4, "hidden": 256, "heads": 8, "sequence_length": 128}
DEEP = {"layers": 10, "hidden": 128, "heads": 4, "sequence_length": 128}
LONG = {"layers": 3, "hidden": 192, "heads": 6, "sequence_length": 384}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Case: the job and cluster for which the planner chooses a certain plan."""

    name: str
    nodes: int
    model: dict[str, int]
    microbatch: int
    microbatches: int
    #: Least nodes per pipeline, and losses to survive, which determine the shape.
    min_nodes: int = 1
    fault_tolerance: int = 0
    training: dict[str, Any] = field(default_factory=dict)

    def job(self, steps: int) -> dict[str, object]:
        return {
            "name": "predict",
            "model": self.model,
            "data": {"text": [TEXT]},
            "training": {
                "steps": 10 * steps,  # the run ends before the job
                "global_batch": self.microbatch * self.microbatches,
                "microbatch": self.microbatch,
                **self.training,
            },
            "fault_tolerance": self.fault_tolerance,
            "resources": {"min_nodes_per_pipeline": self.min_nodes},
            "profile": "measure",
        }


CASES = (
    Case(name="one", nodes=1, model=WIDE, microbatch=2, microbatches=8),
    Case(name="one-deep", nodes=1, model=DEEP, microbatch=4, microbatches=4),
    Case(name="pipe2", nodes=2, model=WIDE, microbatch=2, microbatches=8, min_nodes=2),
    Case(name="pipe2-few", nodes=2, model=WIDE, microbatch=2, microbatches=2, min_nodes=2),
    Case(name="pipe2-deep", nodes=2, model=DEEP, microbatch=4, microbatches=8, min_nodes=2),
    Case(name="pipe2-long", nodes=2, model=LONG, microbatch=1, microbatches=12, min_nodes=2),
    Case(name="data2", nodes=2, model=WIDE, microbatch=2, microbatches=8, fault_tolerance=1),
    Case(name="data2-deep", nodes=2, model=DEEP, microbatch=4, microbatches=8, fault_tolerance=1),
    Case(name="data2-odd", nodes=2, model=LONG, microbatch=2, microbatches=5, fault_tolerance=1),
    Case(name="pipe3", nodes=3, model=DEEP, microbatch=4, microbatches=8, min_nodes=3),
    Case(name="2+1", nodes=3, model=WIDE, microbatch=2, microbatches=9, fault_tolerance=1),
    Case(
        name="2+2",
        nodes=4,
        model=WIDE,
        microbatch=2,
        microbatches=8,
        min_nodes=2,
        fault_tolerance=1,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    case: Case
    shape: str
    predicted_s: float
    measured_s: float
    #: Share of all cores used by processes outside the cluster.
    others: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


def read_plan(status: Record) -> Plan:
    """Parse the plan in the output of `oobleck status JOB --json`."""
    drawn = status["plan"]
    return Plan.of_pipelines(
        [
            Pipeline(
                nodes=tuple(NodeName(node) for node in pipeline["nodes"]),
                stages=tuple(
                    Hold(
                        first_layer=int(stage["first_layer"]),
                        last_layer=int(stage["last_layer"]),
                        workers=tuple(
                            WorkerId(NodeName(worker["node"]), int(worker["slot"]))
                            for worker in stage["workers"]
                        ),
                    )
                    for stage in pipeline["stages"]
                ),
                microbatches=int(pipeline["microbatches"]),
            )
            for pipeline in drawn["pipelines"]
        ],
        generation=Generation(int(drawn["generation"])),
        schedule=drawn["schedule"],
    )


def shape_of(plan: Plan) -> str:
    """Format the layers of each stage and the micro-batches of each pipeline, as `4+2 x5 | 6
    x3`."""
    pipelines = " | ".join(
        "+".join(str(len(stage.layers)) for stage in pipeline.stages) + f" x{pipeline.microbatches}"
        for pipeline in plan.pipelines
    )
    return f"{pipelines} {plan.schedule}"


def busy_s() -> float:
    """Return the CPU seconds spent on all processes since the machine's start."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def own_s(cluster: LocalCluster) -> float:
    """Return the CPU seconds of the cluster's processes so far."""
    total = 0.0
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def run(case: Case, steps: int, cores: int) -> Outcome:
    with LocalCluster(case.nodes) as cluster:
        begun, busy_before, own_before = time.monotonic(), busy_s(), own_s(cluster)
        job_id = cluster.submit(case.job(WARM_UP_STEPS + steps))
        cluster.wait_step(job_id, WARM_UP_STEPS + steps, timeout_s=600)
        busy, own = busy_s() - busy_before, own_s(cluster) - own_before
        others = (busy - own) / (time.monotonic() - begun) / cores
        plan = read_plan(cluster.status(job_id))
        (stored,) = (cluster.state_dir / "profiles").glob("*.json")
        profile = parse_profile(stored.read_bytes())
        seconds = [
            float(r["step_seconds"])
            for r in cluster.metrics(job_id)[WARM_UP_STEPS : WARM_UP_STEPS + steps]
        ]
    return Outcome(
        case=case,
        shape=shape_of(plan),
        predicted_s=predict(plan, profile),
        measured_s=statistics.median(seconds),
        others=max(0.0, others),
    )


def predict(plan: Plan, profile: Profile) -> float:
    return estimate_step(plan, profile, tied=True).step_s


def row(name: str, *cells: object) -> str:
    *numbers, plan = cells
    return f"{name:<12}" + "".join(f"{number!s:>11}" for number in numbers) + f"  {plan}"


def summary(outcomes: Sequence[Outcome], title: str) -> str:
    errors = [abs(outcome.error) for outcome in outcomes]
    if not errors:
        return f"{title}: none"
    worst = max(outcomes, key=lambda outcome: abs(outcome.error))
    return (
        f"{title}: median error {statistics.median(errors):.1%} over {len(errors)} plans, "
        f"largest {worst.error:+.1%} ({worst.case.name})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", metavar="NAME")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    outcomes = []
    print(f"{cores} cores, one thread per worker")
    print(row("case", "workers", "predicted", "measured", "error", "others", "plan"))
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        runs = [run(case, arguments.steps, cores) for _ in range(arguments.repeats)]
        outcome = min(runs, key=lambda one: one.others)
        outcomes.append(outcome)
        print(
            row(
                case.name,
                case.nodes,
                f"{outcome.predicted_s:.3f} s",
                f"{outcome.measured_s:.3f} s",
                f"{outcome.error:+.1%}",
                f"{outcome.others:.0%}",
                outcome.shape,
            ),
            flush=True,
        )
    print(summary([o for o in outcomes if o.case.nodes <= cores], "a core for each worker"))
    print(summary([o for o in outcomes if o.case.nodes > cores], "cores shared by workers"))


if __name__ == "__main__":
    main()

"""Predicted and measured peak memory of workers, on several shapes.

    python -m bench.memory [--only NAME;...] [--steps N] [--json FILE]

Predicted: what `oobleck plan` says of each stage, by a profile measured as before a job, and by the
estimate. Measured: what real workers report after some steps: the most memory of their
own (pages without a file behind them), less what they had before the first layer. Only proportions
to the state tell something, so the models are large enough for state of 100 to 400 MB per worker.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.support.engine import ENDLESS, engine, plan_of
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import Committed, MemoryUse
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.sharing import sharing_sizes
from oobleck.planner.cost.estimate import worker_peak_bytes
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.measurement import assemble_profile
from oobleck.worker.profiling.measure_layers import measure_layers

TEXT = str(Path(__file__).resolve().parents[1] / "LICENSE")
#: Far above what any of the plans takes: the profile's limit plays no part here.
_MEMORY = 1 << 40
MOMENTUM = OptimizerSpec(name="sgd", lr=0.01, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    job: JobSpec
    #: Layers of each stage, or (layers, workers), by pipeline; and each pipeline's micro-batches.
    cuts: Sequence[Sequence[int | tuple[int, int]]]
    shares: list[int]
    #: Stages of several workers keep what they gather.
    resident: bool = False

    @property
    def plan(self) -> Plan:
        return plan_of(self.cuts, self.shares, resident=self.resident)

    @property
    def gpus(self) -> int:
        """Number of workers of the largest stage."""
        return max(len(stage.workers) for p in self.plan.pipelines for stage in p.stages)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Peak memory of one worker, in bytes."""

    case: str
    worker: str
    predicted: int
    estimated: int
    measured: int
    base: int


def job(**training: Any) -> JobSpec:
    values = {"steps": ENDLESS, "global_batch": 4, "microbatch": 1, **training}
    return JobSpec(
        name="memory",
        model=ModelSpec(layers=4, hidden=512, heads=8, sequence_length=256, vocabulary=8192),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(**values),
        fault_tolerance=0,
    )


CASES = [
    Case(name="1 worker", job=job(), cuts=[[6]], shares=[4]),
    Case(name="1 worker, recompute", job=job(recompute="layer"), cuts=[[6]], shares=[4]),
    Case(name="1 worker, bf16", job=job(precision="bf16"), cuts=[[6]], shares=[4]),
    Case(name="1 worker, momentum", job=job(optimizer=MOMENTUM), cuts=[[6]], shares=[4]),
    Case(name="2 replicas", job=job(), cuts=[[6], [6]], shares=[2, 2]),
    Case(name="2 stages", job=job(), cuts=[[3, 3]], shares=[4]),
    Case(name="2 stages, recompute", job=job(recompute="layer"), cuts=[[3, 3]], shares=[4]),
    Case(name="2 stages x 2", job=job(), cuts=[[3, 3], [3, 3]], shares=[2, 2]),
    Case(
        name="2 stages x 2, bf16, recompute",
        job=job(precision="bf16", recompute="layer"),
        cuts=[[3, 3], [3, 3]],
        shares=[2, 2],
    ),
    Case(name="2 workers of 1 stage", job=job(microbatch=2), cuts=[[(6, 2)]], shares=[2]),
    Case(
        name="2 workers of 1 stage, resident",
        job=job(microbatch=2),
        cuts=[[(6, 2)]],
        shares=[2],
        resident=True,
    ),
    Case(
        name="2 workers of 1 stage x 2",
        job=job(microbatch=2),
        cuts=[[(6, 2)], [(6, 2)]],
        shares=[1, 1],
    ),
]


def predicted(plan: Plan, profile: Profile) -> dict[str, int]:
    peaks = worker_peak_bytes(plan, profile)
    return {str(worker): peak for worker, peak in peaks.items()}


def measured_profile(job: JobSpec, gpus: int) -> Profile:
    sizes = sharing_sizes(job.training.microbatch, gpus)
    found = measure_layers(job, torch.device("cpu"), "cpu", lambda: None, sizes=sizes)
    return assemble_profile(job, [found], [], gpus_per_node=gpus, memory_bytes=_MEMORY)[0]


def run(case: Case, steps: int, warm: Any) -> dict[str, MemoryUse]:
    plan = case.plan
    with engine().Director(warm, case.job) as cluster:
        cluster.start(*(str(worker) for worker in plan.workers))
        cluster.assign(plan)
        for step in range(1, steps + 1):  # each wait has its own limit of time
            cluster.wait(lambda step=step: step in cluster.records, f"step {step}")
        found = {}
        for worker in plan.workers:
            committed = cluster.said(worker, Committed)
            assert committed, f"{worker} has committed nothing"
            found[str(worker)] = committed[-1].memory
        return found


def rows(case: Case, steps: int, warm: Any) -> Iterator[Row]:
    plan, gpus = case.plan, case.gpus
    guess = estimate_profile(case.job, gpus_per_node=gpus, memory_per_worker_bytes=_MEMORY)
    expected, estimated = predicted(plan, measured_profile(case.job, gpus)), predicted(plan, guess)
    for worker, memory in run(case, steps, warm).items():
        yield Row(
            case=case.name,
            worker=worker,
            predicted=expected[worker],
            estimated=estimated[worker],
            measured=memory.peak_bytes - memory.base_bytes,
            base=memory.base_bytes,
        )


def show(row: Row) -> str:
    sizes = (row.measured, row.predicted, row.estimated, row.base)
    measured, expected, estimated, base = (f"{size / 1e6:>9.0f}" for size in sizes)
    off, guess_off = (
        f"{value / row.measured - 1:>+7.1%}" for value in (row.predicted, row.estimated)
    )
    return f"{row.case:<30} {row.worker:<6}{measured}{expected} {off}{estimated} {guess_off}{base}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="names of cases, separated by semicolons")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = arguments.only.split(";") if arguments.only else [case.name for case in CASES]
    if unknown := set(wanted) - {case.name for case in CASES}:
        sys.exit(f"no case is called {', '.join(unknown)}; there are {[c.name for c in CASES]}")
    torch.set_num_threads(1)
    found = []
    print(
        f"{'MB':<30} {'worker':<6}{'measured':>9}{'predicted':>9} {'':>7}{'estimate':>9} {'':>7}"
        f"{'base':>9}"
    )
    with engine().WarmWorkers() as warm:
        for case in CASES:
            if case.name in wanted:
                for row in rows(case, arguments.steps, warm):
                    print(show(row), flush=True)
                    found.append(row)
    if arguments.json:
        content = [{name: getattr(row, name) for name in Row.__dataclass_fields__} for row in found]
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

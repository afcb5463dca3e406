"""The engine on its own, for benchmarks: real workers, no agents and no master, chosen plans.

The driver is the one that the tests use. Between its turns a contender's workers are stopped by a
signal, in the middle of a step; the step that they were in does not count.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.support.turns import Turn, footprint
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan
from oobleck.core.schedules import Schedule

ROOT = Path(__file__).resolve().parents[2]
#: Steps of a benchmark's job: more than any benchmark runs.
ENDLESS = 10**9


def engine() -> Any:
    """Return the tests' driver of real workers, which needs no agents and no master."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("support.director")


def plan_of(
    cuts: Sequence[Sequence[int | tuple[int, int]]],
    shares: Sequence[int],
    schedule: Schedule = "1f1b",
    *,
    resident: bool = False,
) -> Plan:
    """Return a plan. `cuts`: by pipeline, the layers of each stage, or (layers, workers); every
    stage is on a node of its own."""
    names = iter(f"n{number}" for number in range(sum(map(len, cuts))))
    placed = [
        [(next(names), *((stage, 1) if isinstance(stage, int) else stage)) for stage in cut]
        for cut in cuts
    ]
    plan: Plan = engine().make_plan(1, placed, shares, resident=resident)
    return replace(plan, schedule=schedule)


class EngineContender:
    """Workers of one job on one plan; a context manager."""

    def __init__(self, warm: Any, job: JobSpec, plan: Plan) -> None:
        """`warm`: the driver's WarmWorkers, which may serve many."""
        self._plan = plan
        self._cluster = engine().Director(warm, job)
        self._last = 0

    def __enter__(self) -> "EngineContender":
        try:
            self._cluster.start(*map(str, self._plan.workers))
            self._cluster.assign(self._plan)
            self._wait_step(1)
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cluster.__exit__(kind, error, trace)

    def run(self, steps: int) -> Turn:
        resumed = time.time()
        self._signal(signal.SIGCONT)
        first = self._last + 1
        self._wait_step(first)
        processor = self._processor_s()
        self._wait_step(first + steps)
        processor = self._processor_s() - processor
        self._signal(signal.SIGSTOP)
        begun, ended = self._committed_at(first), self._committed_at(first + steps)
        assert begun > resumed, "the step that was interrupted ends after the pause"
        return Turn(
            step_s=(ended - begun) / steps,
            processor_s=processor / steps,
            footprint=footprint(self._pids()),
        )

    def _processor_s(self) -> float:
        # Read the processes' CPU clocks (clock_getcpuclockid(3)): the process table has steps of 10
        # ms.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._pids())

    def _committed_at(self, step: int) -> float:
        return max(float(record.time) for record in self._cluster.records[step])

    def _wait_step(self, step: int) -> None:
        records, count = self._cluster.records, len(self._plan.workers)
        self._cluster.wait(lambda: len(records.get(step, ())) == count, f"step {step}")
        self._last = step

    def _signal(self, signum: signal.Signals) -> None:
        for pid in self._pids():
            os.kill(pid, signum)

    def _pids(self) -> list[int]:
        return [live.pid for live in self._cluster.workers.values()]

"""Fewer layers for slow workers: other contiguous cuts of pipelines, on the same workers in their
order. State moves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heapreplace
from types import EllipsisType

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hold
from oobleck.planner.cost.estimate import kinds_of
from oobleck.planner.cost.kinds import Cut, Kind
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stages import StageTable
from oobleck.planner.programs.compiler.schedule import in_flight

# ---- Fewer micro-batches for slow pipelines: shares of given pipelines by their rates.


#: Share that few pipelines exceed, as a multiple of the average.
_USUAL = 4


def reshared(plan: Plan, profile: Profile) -> Plan:
    """Return `plan`, of pipelines, with the shares that minimise the time of the last pipeline.

    Each has at least one micro-batch. Each further one goes to the pipeline that would finish it
    first; ties go to the first pipeline. This is optimal, since more micro-batches never make a
    pipeline finish sooner.
    """
    cuts = {number: each.kind.cut for each in kinds_of(plan, profile) for number in each.numbers}
    all_but_one = plan.microbatches - len(plan.routes) + 1
    most = min(all_but_one, _USUAL * plan.microbatches // len(plan.routes) + 1)
    shares = _shares(plan, cuts, most)
    if max(shares) == most < all_but_one:
        shares = _shares(plan, cuts, all_but_one)
    routes = zip(plan.routes, shares, strict=True)
    return replace(
        plan, routes=tuple(structs.replace(r, microbatches=share) for r, share in routes)
    )


def _shares(plan: Plan, cuts: Mapping[int, Cut], most: int) -> list[int]:
    """Share the batch among the routes, with no share above `most`."""
    asked = [
        (plan.schedule, Kind(count, cut))
        for cut in dict.fromkeys(cuts.values())
        for count in range(1, most + 1)
    ]
    done_s = {kind: max(ends) for (_, kind), ends in computed_s(asked).items()}
    shares = [1] * len(plan.routes)
    heap = [(_next_s(done_s, Kind(2, cuts[n]), most), n) for n in range(len(shares))]
    heapify(heap)
    for _ in range(plan.microbatches - len(shares)):
        number = heap[0][1]
        shares[number] += 1
        following = Kind(shares[number] + 1, cuts[number])
        heapreplace(heap, (_next_s(done_s, following, most), number))
    return shares


def _next_s(done_s: dict[Kind, float], kind: Kind, most: int) -> float:
    return done_s[kind] if kind.microbatches <= most else float("inf")


#: Cuts whose slowest stages differ by less are equal; the one that moves least is taken.
_TIE = Fraction(1, 100)
_Matrix = NDArray[np.float64]


def recut(plan: Plan, profile: Profile) -> Plan:
    """Return `plan`, of pipelines, each recut so that its slowest stage is as fast as the memory
    for its schedule allows. Cuts that are already as good stay. Workers that hold layers without
    running any are left out."""
    table = StageTable(profile)
    state = np.cumsum([0, *(layer.travelling_bytes for layer in profile.layers)], dtype=np.float64)
    pipelines = tuple(_recut(pipeline, plan, table, state) for pipeline in plan.pipelines)
    if pipelines == plan.pipelines:
        return plan
    made = Plan.of_pipelines(pipelines, generation=plan.generation, schedule=plan.schedule)
    return made.with_rates({slow.worker: slow.rate for slow in plan.rates})


def _recut(pipeline: Pipeline, plan: Plan, table: StageTable, state: _Matrix) -> Pipeline:
    holds = pipeline.stages
    stages = [
        _Stage(
            hold=hold,
            table=table,
            kept=in_flight(
                plan.schedule, stages=len(holds), stage=number, microbatches=pipeline.microbatches
            ),
            rate=plan.rate(hold.workers),
        )
        for number, hold in enumerate(holds)
    ]
    limit = _least(stages, len(state)) * float(1 + _TIE)
    if not np.isfinite(limit) or max(stage.now for stage in stages) <= limit:
        return pipeline
    borders = _fewest_bytes(stages, limit, state)
    cut = zip(holds, borders[:-1], borders[1:], strict=True)
    return replace(
        pipeline,
        stages=tuple(
            structs.replace(stage, first_layer=first, last_layer=stop - 1, resident=False)
            for stage, first, stop in cut
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Stage, with its workers' time for any layers. The times of all stages together may take
    hundreds of megabytes."""

    hold: Hold
    table: StageTable
    #: Micro-batches kept at a time.
    kept: int
    rate: float

    def times(self) -> _Matrix:
        """Return the times by [first layer, layer after the last]; infinite where memory is too
        small.
        """
        return self._time(...)

    @property
    def now(self) -> float:
        return float(self._time((self.hold.first_layer, self.hold.last_layer + 1)))

    def _time(self, at: EllipsisType | tuple[int, int]) -> _Matrix:
        choice = self.table.choices.index(len(self.hold.workers))
        room = self.table.room[choice][at] >= self.kept
        return np.where(room, self.table.time[choice][at], np.inf) / self.rate


def _least(stages: Sequence[_Stage], count: int) -> float:
    """Return the time of the slowest stage in the best cut with so many borders."""
    ahead = np.full(count, np.inf)
    ahead[-1] = 0.0
    for stage in reversed(stages):
        best = np.maximum(stage.times(), ahead).min(axis=1)
        ahead = np.append(best, np.inf)
    return float(ahead[0])


def _fewest_bytes(stages: Sequence[_Stage], limit: float, state: _Matrix) -> list[int]:
    """Return where the stages begin in the cut that moves the fewest bytes with no stage slower
    than `limit`."""
    count = len(state)
    ahead = np.full(count, np.inf)
    ahead[-1] = 0.0
    chosen = []
    first, stop = np.arange(count - 1)[:, None], np.arange(count)[None, :]
    for stage in reversed(stages):
        hold = stage.hold
        # Layers that it holds already stay.
        begin = np.clip(first, hold.first_layer, hold.last_layer + 1)
        end = np.clip(stop, hold.first_layer, hold.last_layer + 1)
        kept = np.maximum(state[end] - state[begin], 0.0)
        moved = np.where(stage.times() <= limit, state[stop] - state[first] - kept, np.inf) + ahead
        chosen.append(moved.argmin(axis=1))
        ahead = np.append(moved.min(axis=1), np.inf)
    borders = [0]
    for stops in reversed(chosen):
        borders.append(int(stops[borders[-1]]))
    return borders

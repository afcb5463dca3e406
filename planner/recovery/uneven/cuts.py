"""Fewer layers for slow workers: other contiguous cuts of pipelines, on the same workers in their
order. State moves."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.cost.stagetable import StageTable
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.pipeline import Pipeline
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hold
from oobleck.planner.programs.schedule import in_flight

#: Cuts whose slowest stages differ by so much are equal, and the one that moves least is taken.
_TIE = Fraction(1, 100)
_Matrix = NDArray[np.float64]


def recut(plan: Plan, profile: Profile) -> Plan:
    """`plan`, of pipelines, each cut so that its slowest stage takes as short as it can, where the
    memory holds what its schedule keeps; those stay that are as good as that."""
    table = StageTable(profile)
    state = np.cumsum([0, *(layer.state_bytes for layer in profile.layers)], dtype=np.float64)
    pipelines = tuple(_recut(one, plan, table, state) for one in plan.pipelines)
    if pipelines == plan.pipelines:
        return plan
    found = Plan.of_pipelines(pipelines, generation=plan.generation, schedule=plan.schedule)
    return replace(found, rates=plan.rates)


def _recut(pipeline: Pipeline, plan: Plan, table: StageTable, state: _Matrix) -> Pipeline:
    stages = pipeline.stages
    times = [
        _times(
            table,
            len(stage.workers),
            in_flight(
                plan.schedule,
                stages=len(stages),
                stage=number,
                microbatches=pipeline.microbatches,
            ),
        )
        / plan.rate(stage.workers)
        for number, stage in enumerate(stages)
    ]
    limit = _least(times) * float(1 + _TIE)
    if not np.isfinite(limit):
        return pipeline
    now = max(
        float(time[stage.first_layer, stage.last_layer + 1])
        for time, stage in zip(times, stages, strict=True)
    )
    if now <= limit:
        return pipeline
    borders = _fewest_bytes(times, limit, stages, state)
    cut = zip(stages, borders[:-1], borders[1:], strict=True)
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, first_layer=first, last_layer=stop - 1, resident=False)
            for stage, first, stop in cut
        ),
    )


def _times(table: StageTable, gpus: int, kept: int) -> _Matrix:
    """[first layer, layer after the last] of a stage as profiled; infinite: there is no room."""
    choice = table.choices.index(gpus)
    return np.where(table.room[choice] >= kept, table.time[choice], np.inf)


def _least(times: list[_Matrix]) -> float:
    """The slowest stage of the best cut."""
    ahead = np.full(times[0].shape[1], np.inf)
    ahead[-1] = 0.0
    for time in reversed(times):
        best = np.maximum(time, ahead).min(axis=1)
        ahead = np.append(best, np.inf)
    return float(ahead[0])


def _fewest_bytes(
    times: list[_Matrix], limit: float, stages: tuple[Hold, ...], state: _Matrix
) -> list[int]:
    """Where the stages of the cut begin that moves the fewest bytes, none slower than `limit`."""
    count = len(state)
    ahead = np.full(count, np.inf)
    ahead[-1] = 0.0
    chosen = []
    first, stop = np.arange(count - 1)[:, None], np.arange(count)[None, :]
    for time, stage in zip(reversed(times), reversed(stages), strict=True):
        # What it holds already stays.
        begin = np.clip(first, stage.first_layer, stage.last_layer + 1)
        end = np.clip(stop, stage.first_layer, stage.last_layer + 1)
        kept = np.maximum(state[end] - state[begin], 0.0)
        moved = np.where(time <= limit, state[stop] - state[first] - kept, np.inf) + ahead
        chosen.append(moved.argmin(axis=1))
        ahead = np.append(moved.min(axis=1), np.inf)
    borders = [0]
    for stops in reversed(chosen):
        borders.append(int(stops[borders[-1]]))
    return borders

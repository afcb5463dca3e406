"""What a step of a whole plan takes, from one timeline for each kind of pipeline.

Pipelines of the same cut and the same number of micro-batches run alike, and most plans have few
kinds of them. The result is that of `oobleck.planner.simulate` on all programs, in
O(pipelines + kinds x stages x micro-batches), whatever the number of workers. Owns the recurrence
of times along a pipeline; must not build programs.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from oobleck.planner.cost import boundary_s
from oobleck.planner.ids import WorkerId
from oobleck.planner.plan import Pipeline, Plan, Schedule
from oobleck.planner.profile import Profile
from oobleck.planner.program import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.planner.schedule import compute_order, in_flight
from oobleck.planner.stepcost import (
    StageCost,
    extrapolated,
    replayed_microbatches,
    stage_cost,
)
from oobleck.planner.stepend import ComputedKind, ComputedStage, step_end_s

#: When the stages of pipelines have computed their last, by how the pipeline is cut, its share and
#: the schedule: kept by who asks about many plans of the same pipelines.
Memory = dict[object, tuple[float, ...]]

#: (what, micro-batch counted from 0, from when, to when)
Event = tuple[type[Compute], int, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindEstimate:
    """Pipelines of the same cut and the same number of micro-batches; values are per stage."""

    #: Their positions in the plan, and the first of them.
    numbers: tuple[int, ...]
    pipeline: Pipeline
    #: Seconds each worker computes in a step.
    busy_s: tuple[float, ...]
    #: When its last forward or backward is over.
    computed_s: tuple[float, ...]
    #: Of one worker: state and the activations at their highest.
    peak_bytes: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """What a step of the plan takes under one schedule."""

    schedule: Schedule
    step_s: float
    #: Share of all workers' time that is not spent computing.
    bubble: float
    #: In the order of their first pipelines.
    kinds: tuple[KindEstimate, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the worker that needs most memory."""
        return max(peak for kind in self.kinds for peak in kind.peak_bytes)


def estimate_step(
    plan: Plan, profile: Profile, *, tied: bool = False, schedule: Schedule | None = None
) -> StepEstimate:
    """Time, bubble and memory of one step of `plan`; `schedule` in place of the plan's own.

    Beyond some hundreds of micro-batches per pipeline, times are extrapolated from the steady
    state, to within a fraction of a per cent.
    """
    chosen = schedule or plan.schedule
    return estimate_schedules(plan, profile, [chosen], tied=tied)[chosen]


def estimate_schedules(
    plan: Plan,
    profile: Profile,
    schedules: Iterable[Schedule],
    *,
    tied: bool = False,
    memory: Memory | None = None,
) -> dict[Schedule, StepEstimate]:
    """`estimate_step` under each of `schedules`; `memory` is of the same profile."""
    alike, known = pipeline_kinds(plan), {} if memory is None else memory
    return {
        schedule: _estimate(plan, alike, profile, schedule, tied=tied, memory=known)
        for schedule in schedules
    }


def _estimate(
    plan: Plan,
    alike: Iterable[tuple[int, ...]],
    profile: Profile,
    schedule: Schedule,
    *,
    tied: bool,
    memory: Memory,
) -> StepEstimate:
    kinds = tuple(_kind(plan, numbers, profile, schedule, memory) for numbers in alike)
    workers = sum(kind.count * len(s.workers) for kind in kinds for s in kind.pipeline.stages)
    costs = [[_cost(kind.pipeline, s, profile) for s in _stages(kind.pipeline)] for kind in kinds]
    ended = [_computed(kind, row) for kind, row in zip(kinds, costs, strict=True)]
    step_s = step_end_s(ended, profile, tied=tied)
    busy = sum(
        kind.count * len(stage.workers) * (busy_s + cost.update_s)
        for kind, row in zip(kinds, costs, strict=True)
        for stage, busy_s, cost in zip(kind.pipeline.stages, kind.busy_s, row, strict=True)
    )
    return StepEstimate(
        schedule=schedule,
        step_s=step_s,
        bubble=1.0 - busy / (step_s * workers) if step_s else 0.0,
        kinds=kinds,
    )


def _computed(kind: KindEstimate, costs: Sequence[StageCost]) -> ComputedKind:
    node = {name: number for number, name in enumerate(kind.pipeline.nodes)}
    return ComputedKind(
        count=kind.count,
        stages=[
            ComputedStage(
                first_layer=stage.first_layer,
                last_layer=stage.last_layer,
                gpus=len(stage.workers),
                node=node[stage.workers[0].node],
                computed_s=computed_s,
                update_s=cost.update_s,
            )
            for stage, computed_s, cost in zip(
                kind.pipeline.stages, kind.computed_s, costs, strict=True
            )
        ],
    )


def pipeline_kinds(plan: Plan) -> list[tuple[int, ...]]:
    """The positions in the plan of pipelines that are alike, kind by kind."""
    kinds: dict[object, list[int]] = {}
    for number, pipeline in enumerate(plan.pipelines):
        kinds.setdefault(_cut_and_share(pipeline), []).append(number)
    return [tuple(numbers) for numbers in kinds.values()]


def _cut_and_share(pipeline: Pipeline) -> object:
    """What pipelines that are alike have in common."""
    place = {node: position for position, node in enumerate(pipeline.nodes)}
    return (
        pipeline.microbatches,
        *((s.first_layer, len(s.workers), place[s.workers[0].node]) for s in pipeline.stages),
    )


def _stages(pipeline: Pipeline) -> range:
    return range(len(pipeline.stages))


def _cost(pipeline: Pipeline, stage: int, profile: Profile) -> StageCost:
    place = pipeline.stages[stage]
    return stage_cost(
        profile,
        place.first_layer,
        place.last_layer,
        len(place.workers),
        resident=place.resident,
    )


# ---- one pipeline


def _kind(
    plan: Plan,
    numbers: tuple[int, ...],
    profile: Profile,
    schedule: Schedule,
    memory: Memory,
) -> KindEstimate:
    pipeline = plan.pipelines[numbers[0]]
    key = schedule, _cut_and_share(pipeline)
    if key not in memory:
        memory[key] = _computed_s(pipeline, profile, schedule)
    costs = [_cost(pipeline, stage, profile) for stage in _stages(pipeline)]
    microbatches = pipeline.microbatches
    return KindEstimate(
        numbers=numbers,
        pipeline=pipeline,
        busy_s=tuple(microbatches * (cost.forward_s + cost.backward_s) for cost in costs),
        computed_s=memory[key],
        peak_bytes=_peak_bytes(costs, schedule, microbatches, replicas=len(plan.pipelines)),
    )


def _peak_bytes(
    costs: Sequence[StageCost], schedule: Schedule, microbatches: int, *, replicas: int
) -> tuple[int, ...]:
    return tuple(
        cost.worker_bytes(
            in_flight(schedule, stages=len(costs), stage=stage, microbatches=microbatches),
            replicas=replicas,
        )
        for stage, cost in enumerate(costs)
    )


def peak_bytes(plan: Plan, profile: Profile) -> int:
    """Of the worker that needs most memory, under the plan's schedule."""
    return max(peak for _, peaks in _peaks(plan, profile) for peak in peaks)


def worker_peak_bytes(plan: Plan, profile: Profile) -> dict[WorkerId, int]:
    """Of every worker, in the order of the plan, under its schedule."""
    found = {
        worker: peak
        for numbers, peaks in _peaks(plan, profile)
        for number in numbers
        for stage, peak in zip(plan.pipelines[number].stages, peaks, strict=True)
        for worker in stage.workers
    }
    return {worker: found[worker] for worker in plan.workers}


def _peaks(plan: Plan, profile: Profile) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each kind of pipeline its positions in the plan, and the bytes per stage."""
    for numbers in pipeline_kinds(plan):
        pipeline = plan.pipelines[numbers[0]]
        costs = [_cost(pipeline, stage, profile) for stage in _stages(pipeline)]
        yield (
            numbers,
            _peak_bytes(costs, plan.schedule, pipeline.microbatches, replicas=len(plan.pipelines)),
        )


def _computed_s(pipeline: Pipeline, profile: Profile, schedule: Schedule) -> tuple[float, ...]:
    """When each stage has computed its last, by the whole timeline or from its steady state."""
    counts = replayed_microbatches(pipeline.microbatches, stages=len(pipeline.stages))
    ends = [
        _ends(timeline(replace(pipeline, microbatches=count), profile, schedule))
        for count in counts
    ]
    return extrapolated(counts, ends, pipeline.microbatches)


def _ends(rows: Sequence[Sequence[Event]]) -> tuple[float, ...]:
    return tuple(row[-1][3] for row in rows)


def timeline(pipeline: Pipeline, profile: Profile, schedule: Schedule) -> list[list[Event]]:
    """What each stage computes from when to when; its workers run in step.

    Sends are asynchronous. Between stages of different numbers of workers, the largest of the
    shares that travel side by side counts.
    """
    count = len(pipeline.stages)
    ways = [
        boundary_s(
            profile.layers[before.last_layer].output_bytes,
            before=len(before.workers),
            after=len(after.workers),
            same_node=before.workers[0].node == after.workers[0].node,
            links=profile.links,
        )
        for before, after in pairwise(pipeline.stages)
    ]
    times = [_times(_cost(pipeline, stage, profile)) for stage in range(count)]
    orders = [
        list(compute_order(schedule, stages=count, stage=stage, microbatches=pipeline.microbatches))
        for stage in range(count)
    ]
    rows: list[list[Event]] = [[] for _ in range(count)]
    # By stage and micro-batch: when the activation, or the gradient, has arrived.
    activations: list[dict[int, float]] = [{} for _ in range(count)]
    gradients: list[dict[int, float]] = [{} for _ in range(count)]
    clocks = [0.0] * count
    runnable = deque(range(count))
    while runnable:
        stage = runnable.popleft()
        row, order, clock = rows[stage], orders[stage], clocks[stage]
        while len(row) < len(order):
            kind, microbatch = order[len(row)]
            arrived: float | None = 0.0
            if kind is Forward and stage > 0:
                arrived = activations[stage].pop(microbatch, None)
            elif (kind is Backward or kind is BackwardInput) and stage < count - 1:
                arrived = gradients[stage].pop(microbatch, None)
            if arrived is None:
                break
            begun = max(clock, arrived)
            clock = begun + times[stage][kind]
            row.append((kind, microbatch, begun, clock))
            if kind is Forward and stage < count - 1:
                activations[stage + 1][microbatch] = clock + ways[stage]
                runnable.append(stage + 1)
            elif (kind is Backward or kind is BackwardInput) and stage > 0:
                gradients[stage - 1][microbatch] = clock + ways[stage - 1]
                runnable.append(stage - 1)
        clocks[stage] = clock
    return rows


def _times(cost: StageCost) -> Mapping[type[Compute], float]:
    return {
        Forward: cost.forward_s,
        Backward: cost.backward_s,
        BackwardInput: cost.backward_input_s,
        BackwardWeight: cost.backward_weight_s,
    }

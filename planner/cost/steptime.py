"""What a step of a whole plan takes, from one timeline for each kind of pipeline.

Pipelines of the same cut and the same number of micro-batches run alike, and most plans have few
kinds of them. The result is that of `oobleck.planner.cost.simulate` on all programs, in
O(pipelines + kinds x stages x micro-batches), whatever the number of workers. When stages have
computed their last is `oobleck.planner.cost.finish`'s; must not build programs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from oobleck.planner.cost.finish import Run, finish_s
from oobleck.planner.cost.formula import boundary_s
from oobleck.planner.cost.stepcost import StageCost, stage_cost
from oobleck.planner.cost.stepend import ComputedKind, ComputedStage, step_end_s
from oobleck.planner.ids import WorkerId
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Pipeline, Plan
from oobleck.planner.programs.schedule import in_flight
from oobleck.planner.schedules import Schedule

#: When the stages of pipelines have computed their last, by how the pipeline is cut, its share and
#: the schedule: kept by who asks about many plans of the same pipelines.
Memory = dict[tuple[Schedule, object], tuple[float, ...]]


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
    schedules: Sequence[Schedule],
    *,
    tied: bool = False,
    memory: Memory | None = None,
) -> dict[Schedule, StepEstimate]:
    """`estimate_step` under each of `schedules`; `memory` is of the same profile."""
    alike, known = pipeline_kinds(plan), {} if memory is None else memory
    remember([plan], profile, schedules, memory=known)
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
    costs = [[cost_of(kind.pipeline, s, profile) for s in _stages(kind.pipeline)] for kind in kinds]
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


def cost_of(pipeline: Pipeline, stage: int, profile: Profile) -> StageCost:
    place = pipeline.stages[stage]
    return stage_cost(
        profile,
        place.first_layer,
        place.last_layer,
        len(place.workers),
        resident=place.resident,
    )


# ---- one pipeline


def remember(
    plans: Iterable[Plan], profile: Profile, schedules: Sequence[Schedule], *, memory: Memory
) -> None:
    """Find for `memory` what estimates of `plans` will ask of it: for all at once is faster."""
    unknown = {
        (schedule, _cut_and_share(pipeline)): pipeline
        for plan in plans
        for pipeline in (plan.pipelines[numbers[0]] for numbers in pipeline_kinds(plan))
        for schedule in schedules
    }
    unknown = {key: pipeline for key, pipeline in unknown.items() if key not in memory}
    runs = [_run(pipeline, profile, schedule) for (schedule, _), pipeline in unknown.items()]
    memory.update(zip(unknown, finish_s(runs), strict=True))


def _kind(
    plan: Plan,
    numbers: tuple[int, ...],
    profile: Profile,
    schedule: Schedule,
    memory: Memory,
) -> KindEstimate:
    pipeline = plan.pipelines[numbers[0]]
    costs = [cost_of(pipeline, stage, profile) for stage in _stages(pipeline)]
    microbatches = pipeline.microbatches
    return KindEstimate(
        numbers=numbers,
        pipeline=pipeline,
        busy_s=tuple(microbatches * (cost.forward_s + cost.backward_s) for cost in costs),
        computed_s=memory[schedule, _cut_and_share(pipeline)],
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
        costs = [cost_of(pipeline, stage, profile) for stage in _stages(pipeline)]
        yield (
            numbers,
            _peak_bytes(costs, plan.schedule, pipeline.microbatches, replicas=len(plan.pipelines)),
        )


def _run(pipeline: Pipeline, profile: Profile, schedule: Schedule) -> Run:
    costs = [cost_of(pipeline, stage, profile) for stage in _stages(pipeline)]
    whole = Run(
        microbatches=pipeline.microbatches,
        forward_s=tuple(cost.forward_s for cost in costs),
        backward_s=tuple(cost.backward_s for cost in costs),
        message_s=messages_s(pipeline, profile),
        all_forward_first=schedule == "gpipe",
    )
    if schedule != "zb-h1":
        return whole
    # Nobody waits for the first stage's input gradient: its backward stays in one piece.
    first, *later = costs
    return replace(
        whole,
        backward_s=(first.backward_s, *(cost.backward_input_s for cost in later)),
        weight_s=(0.0, *(cost.backward_weight_s for cost in later)),
    )


def messages_s(pipeline: Pipeline, profile: Profile) -> tuple[float, ...]:
    """Between a stage and the next one. Where their numbers of workers differ, the largest of the
    shares that travel side by side counts."""
    return tuple(
        boundary_s(
            profile.layers[before.last_layer].output_bytes,
            before=len(before.workers),
            after=len(after.workers),
            same_node=before.workers[0].node == after.workers[0].node,
            links=profile.links,
        )
        for before, after in pairwise(pipeline.stages)
    )

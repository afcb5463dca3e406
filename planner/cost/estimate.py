"""Estimates of step time and memory, for one plan or for many at once.

Pipelines that run alike are replayed once and remembered. Most plans have few kinds of them, so an
estimate takes O(pipelines + kinds x stages x micro-batches) whatever the number of workers. Must
not build programs, nor choose.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Share
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import Profile
from oobleck.core.schedules import Schedule
from oobleck.core.ties import Ties
from oobleck.planner.cost.ends import Computed, plan_end_s, step_end_s
from oobleck.planner.cost.kinds import (
    Cut,
    Kind,
    Place,
    StageTimes,
    messages_s,
    pipeline_kinds,
    places_of,
    replicas,
)
from oobleck.planner.cost.replay import Ends, Question, computed_s
from oobleck.planner.cost.stages import StageCost, cost_of, idle_bytes, stage_cost
from oobleck.planner.programs.compiler.schedule import in_flight

#: Least gain, as a share of the step, for leaving 1F1B. Splitting the backward was measured to cost
#: 0.5 % of the step in wide layers and 7 % in narrow ones; profiles lack that cost.
SPLITTING_TIE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class KindEstimate:
    """Group of pipelines that run alike; values are per stage."""

    #: Positions of the pipelines in the plan; `pipeline` is the first of them.
    numbers: tuple[int, ...]
    pipeline: Pipeline
    kind: Kind
    #: Seconds from the step's begin to the end of the last forward or backward.
    computed_s: tuple[float, ...]
    #: State and peak activations of one worker.
    peak_bytes: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.numbers)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each worker computes in a step, without the update."""
        return tuple(
            self.kind.microbatches * (stage.forward_s + stage.backward_s)
            for stage in self.kind.cut.stages
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Time and memory of a plan's step under one schedule."""

    schedule: Schedule
    step_s: float
    #: Ordered by first pipeline.
    kinds: tuple[KindEstimate, ...]

    @property
    def bubble(self) -> float:
        """Share of all workers' time that is not spent computing."""
        workers = sum(each.count * each.kind.cut.workers for each in self.kinds)
        busy = sum(
            each.count * place.gpus * (busy_s + stage.update_s)
            for each in self.kinds
            for place, stage, busy_s in zip(
                each.kind.cut.places, each.kind.cut.stages, each.busy_s, strict=True
            )
        )
        return 1.0 - busy / (self.step_s * workers) if self.step_s else 0.0

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the worker that needs most."""
        return max(peak for kind in self.kinds for peak in kind.peak_bytes)


class StageCosts:
    """Costs of a pipeline's stages, with the peaks of memory that were asked for."""

    def __init__(self, costs: Iterable[StageCost]) -> None:
        self.stages = tuple(costs)
        self._peaks: dict[tuple[Schedule, int, bool], tuple[int, ...]] = {}

    def peak_bytes(self, schedule: Schedule, microbatches: int, replicas: int) -> tuple[int, ...]:
        """Return the peak memory of one worker of each stage, in a plan with `replicas` replicas of
        the model."""
        key = schedule, microbatches, replicas > 1
        if key not in self._peaks:
            self._peaks[key] = stage_peak_bytes(self.stages, schedule, microbatches, replicas)
        return self._peaks[key]


class Alike(NamedTuple):
    """Group of pipelines of one kind: their positions in the plan, the first pipeline, the stages'
    costs.
    """

    numbers: tuple[int, ...]
    pipeline: Pipeline
    kind: Kind
    costs: StageCosts


def pipeline_cut(places: tuple[Place, ...], costs: Iterable[StageCost], profile: Profile) -> Cut:
    """Build the cut of a plan's pipelines with stages at these places, under any schedule."""
    times = [
        StageTimes(
            cost.forward_s,
            cost.backward_s,
            cost.backward_input_s,
            cost.backward_weight_s,
            cost.update_s,
        )
        for cost in costs
    ]
    return Cut(places=places, stages=tuple(times), message_s=messages_s(places, profile))


#: Most replays that are kept: each set of rates of slow workers adds some.
_MOST_KEPT = 20_000


class Replays:
    """Step estimates under one profile, whatever its memory; remembers the pipelines it has
    replayed.

    `tied`: the layers that share parameters.
    """

    def __init__(self, profile: Profile, *, tied: Ties) -> None:
        self.profile, self._tied = profile, tied
        self._computed: dict[Question, Ends] = {}
        #: End times of short pipelines; those of longer ones are extrapolated from them.
        self._replayed: dict[Question, Ends] = {}
        self._cuts: dict[tuple[Place, ...], Cut] = {}
        #: By places, and whether each stage is resident.
        self._costs: dict[tuple[tuple[Place, ...], tuple[bool, ...]], StageCosts] = {}
        #: For `counted`: one pipeline of each kind.
        self._alone: dict[Pipeline, Alike] = {}
        self._ends: dict[tuple[Schedule, tuple[tuple[Kind, int], ...]], float] = {}

    def step_s(self, plans: Sequence[Mapping[Kind, int]]) -> list[float]:
        """Return the step time of each plan under 1F1B, in seconds; a plan is a count of pipelines
        by kind."""
        self._replay([("1f1b", kind) for plan in plans for kind in plan])
        return [self._end_s("1f1b", plan) for plan in plans]

    def estimates(
        self, plans: Sequence[Plan], schedules: Sequence[Schedule]
    ) -> list[dict[Schedule, StepEstimate]]:
        """Estimate time, bubble and memory of one step of each plan under each schedule.

        One call for many plans is faster than many calls. Beyond some hundreds of micro-batches per
        pipeline, times are extrapolated from the steady state, to within a fraction of a per cent.
        Raises ValueError, as `stage_cost`.
        """
        kinds = [self.kinds(plan) for plan in plans]
        self._replay([(s, each.kind) for some in kinds for each in some for s in schedules])
        return [
            {
                schedule: self._estimate(some, schedule, replicas(plan), plan)
                for schedule in schedules
            }
            for plan, some in zip(plans, kinds, strict=True)
        ]

    def counted(
        self, plans: Sequence[Mapping[Pipeline, int]], schedules: Sequence[Schedule]
    ) -> list[dict[Schedule, StepEstimate]]:
        """Estimate plans that are given as one pipeline of each kind and the number of such
        pipelines. They have no shadows and no slow workers."""
        kinds = [self.counted_kinds(plan) for plan in plans]
        self._replay([(s, each.kind) for some in kinds for each in some for s in schedules])
        return [
            {schedule: self._estimate(some, schedule, plan.total()) for schedule in schedules}
            for plan, some in zip(map(Counter, plans), kinds, strict=True)
        ]

    def counted_kinds(self, plan: Mapping[Pipeline, int]) -> list[Alike]:
        """Return the kinds of the pipelines of a plan as in `counted`; raises ValueError, as
        `stage_cost`."""
        kinds, first = [], 0
        for pipeline, number in plan.items():
            numbers = tuple(range(first, first + number))
            if pipeline not in self._alone:
                self._alone[pipeline] = self._alike(pipeline, places_of(pipeline), (0,))
            kinds.append(self._alone[pipeline]._replace(numbers=numbers))
            first += number
        return kinds

    def ends_s(self, schedule: Schedule, microbatches: int, cut: Cut) -> Ends:
        """Return when each stage of so many micro-batches through `cut` finishes its compute."""
        asked = schedule, Kind(microbatches, cut)
        self._replay([asked])
        return self._computed[asked]

    def cut(self, places: tuple[Place, ...], costs: Sequence[StageCost]) -> Cut:
        """Return the cut at these places, always the same object."""
        if places not in self._cuts:
            self._cuts[places] = pipeline_cut(places, costs, self.profile)
        return self._cuts[places]

    def kinds(self, plan: Plan) -> list[Alike]:
        """Return the groups of a plan's pipelines that run alike; raises ValueError, as
        `stage_cost`."""
        return [
            self._alike(plan.pipelines[numbers[0]], places, numbers)
            for (_, places), numbers in pipeline_kinds(plan).items()
        ]

    def _alike(
        self, pipeline: Pipeline, places: tuple[Place, ...], numbers: tuple[int, ...]
    ) -> Alike:
        key = places, tuple([stage.resident for stage in pipeline.stages])
        if key not in self._costs:
            pairs = zip(pipeline.stages, places, strict=True)
            self._costs[key] = StageCosts(cost_of(one, self.profile, at.rate) for one, at in pairs)
        costs = self._costs[key]
        kind = Kind(pipeline.microbatches, self.cut(places, costs.stages))
        return Alike(numbers, pipeline, kind, costs)

    def _estimate(
        self, kinds: Sequence[Alike], schedule: Schedule, replicas: int, plan: Plan | None = None
    ) -> StepEstimate:
        """Estimate a step of pipelines of these kinds. `plan`: the plan that they are of; None: it
        has no shadows."""
        shadows = {} if plan is None else shadow_bytes(plan, self.profile)
        estimates = [
            KindEstimate(
                numbers=each.numbers,
                pipeline=each.pipeline,
                kind=each.kind,
                computed_s=self._computed[schedule, each.kind],
                peak_bytes=with_shadow_bytes(
                    each.costs.peak_bytes(schedule, each.kind.microbatches, replicas),
                    plan,
                    each.numbers,
                    shadows,
                ),
            )
            for each in kinds
        ]
        if plan is not None and shadows:  # their holders differ from pipeline to pipeline
            step_s = plan_end_s(plan, worker_ends_s(plan, estimates), self.profile, tied=self._tied)
        else:
            step_s = self._end_s(schedule, {each.kind: each.count for each in estimates})
        return StepEstimate(schedule=schedule, step_s=step_s, kinds=tuple(estimates))

    def _replay(self, questions: Sequence[Question]) -> None:
        # Pipelines of other nodes fill `_alone`, though nothing is computed for them.
        if max(len(self._computed), len(self._alone)) > _MOST_KEPT:
            kept: tuple[dict[Any, Any], ...] = (self._computed, self._replayed, self._cuts)
            for each in (*kept, self._ends, self._costs, self._alone):
                each.clear()
        unknown = dict.fromkeys(q for q in questions if q not in self._computed)
        self._computed.update(computed_s(unknown, self._replayed))

    def _end_s(self, schedule: Schedule, kinds: Mapping[Kind, int]) -> float:
        asked = schedule, tuple(kinds.items())
        if asked not in self._ends:
            self._ends[asked] = step_end_s(
                [
                    Computed(count=count, kind=kind, ends_s=self._computed[schedule, kind])
                    for kind, count in kinds.items()
                ],
                self.profile,
                tied=self._tied,
            )
        return self._ends[asked]


def kinds_of(plan: Plan, profile: Profile) -> Sequence[Alike]:
    """Group the pipelines of a plan that run alike."""
    return Replays(profile, tied=False).kinds(plan)


def worker_ends_s(plan: Plan, kinds: Iterable[KindEstimate]) -> dict[WorkerId, float]:
    """Return when each worker finishes its compute."""
    return {
        worker: end_s
        for kind in kinds
        for number in kind.numbers
        for stage, end_s in zip(plan.pipelines[number].stages, kind.computed_s, strict=True)
        for worker in stage.workers
    }


def estimate_step(
    plan: Plan,
    profile: Profile,
    *,
    tied: Ties = False,
    schedule: Schedule | None = None,
    replays: Replays | None = None,
) -> StepEstimate:
    """Estimate one plan's step (`Replays.estimates`); `schedule` replaces the plan's own.
    `replays`: those so far under `profile`."""
    wanted = schedule or plan.schedule
    return (replays or Replays(profile, tied=tied)).estimates([plan], [wanted])[0][wanted]


def computing_by_layer_s(plan: Plan, profile: Profile) -> Mapping[WorkerId, Mapping[int, float]]:
    """Return the seconds of forward and backward that each layer takes each worker in a step.
    Workers' own measurements are compared with it.

    Workers are in rank order; those that only hold layers have no entries. Workers that share a
    layer count their own rows of a micro-batch. Rates of slow workers are left out. Raises
    ValueError, as `stage_cost`.
    """
    known: dict[tuple[int, int], float] = {}
    by_worker: dict[WorkerId, dict[int, float]] = {worker: {} for worker in plan.workers}
    for route in plan.routes:
        for hop in route.hops:
            parts = len(hop.workers)
            for part, worker in enumerate(hop.workers):
                rows = Share(part, part + 1, parts).of_rows(profile.microbatch)
                share = route.microbatches * len(rows) * parts / profile.microbatch
                own = by_worker[worker]
                for layer in hop.layers if rows else ():
                    if (layer, parts) not in known:
                        known[layer, parts] = _layer_s(profile, layer, parts)
                    own[layer] = own.get(layer, 0.0) + share * known[layer, parts]
    return by_worker


def _layer_s(profile: Profile, layer: int, gpus: int) -> float:
    cost = stage_cost(profile, layer, layer, gpus)
    return cost.forward_s + cost.backward_s


# ---- memory


def peak_bytes(plan: Plan, profile: Profile) -> int:
    """Return the peak memory of the worker that needs most, under the plan's schedule."""
    if plan.shadows:
        return max(worker_peak_bytes(plan, profile).values())
    return max(peak for _, peaks in _peaks(plan, profile, replicas(plan)) for peak in peaks)


def worker_peak_bytes(
    plan: Plan, profile: Profile, *, least_replicas: int = 1
) -> dict[WorkerId, int]:
    """Return the peak memory of every worker, in the order of the plan, under its schedule. The
    estimate assumes at least `least_replicas` replicas of each layer."""
    by_worker = dict.fromkeys(plan.workers, 0)
    for numbers, peaks in _peaks(plan, profile, max(least_replicas, replicas(plan))):
        for number in numbers:
            for stage, peak in zip(plan.pipelines[number].stages, peaks, strict=True):
                for worker in stage.workers:
                    by_worker[worker] = peak
    for worker, taken in shadow_bytes(plan, profile).items():
        by_worker[worker] += taken
    return by_worker


def shadow_bytes(plan: Plan, profile: Profile) -> dict[WorkerId, int]:
    """Return the bytes that workers need for layers that they hold without running them."""
    needed: dict[WorkerId, int] = {}
    shadows = plan.shadows
    for hold in plan.holds if shadows else ():
        for worker in hold.workers:
            if worker not in shadows:
                continue
            idle = [layer for layer in hold.layers if layer in shadows[worker]]
            if idle:
                taken = idle_bytes(profile, idle, len(hold.workers))
                needed[worker] = needed.get(worker, 0) + taken
    return needed


def with_shadow_bytes(
    peaks: tuple[int, ...],
    plan: Plan | None,
    numbers: Iterable[int],
    shadows: Mapping[WorkerId, int],
) -> tuple[int, ...]:
    """Return the stages' peaks with shadows added: per stage, those of the worker that has most.
    `numbers` are the positions in the plan of the pipelines, which run alike."""
    if plan is None or not shadows:
        return peaks
    stages = zip(*(plan.pipelines[number].stages for number in numbers), strict=True)
    return tuple(
        peak + max(shadows.get(worker, 0) for stage in alike for worker in stage.workers)
        for peak, alike in zip(peaks, stages, strict=True)
    )


def _peaks(
    plan: Plan, profile: Profile, replicas: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield for each kind of pipeline its positions in the plan, and the bytes per stage."""
    for (microbatches, _), numbers in pipeline_kinds(plan).items():
        costs = [cost_of(stage, profile) for stage in plan.pipelines[numbers[0]].stages]
        yield numbers, stage_peak_bytes(costs, plan.schedule, microbatches, replicas)


def stage_peak_bytes(
    costs: Sequence[StageCost], schedule: Schedule, microbatches: int, replicas: int
) -> tuple[int, ...]:
    """Return the peak memory of one worker of each stage, in a plan with `replicas` replicas of the
    model."""
    return tuple(
        cost.worker_bytes(
            in_flight(schedule, stages=len(costs), stage=number, microbatches=microbatches),
            replicas=replicas,
        )
        for number, cost in enumerate(costs)
    )

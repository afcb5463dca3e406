"""Choice of a plan's schedule: the fastest of those that fit the memory.

Owns the comparison, the choice of stages whose workers keep gathered weights for a whole step, and
the last step of every plan, its proof (`settled`). `oobleck.planner.cost.estimate` owns the step
time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan
from oobleck.core.profile import Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.ties import Ties
from oobleck.core.units import format_bytes
from oobleck.planner.cost.estimate import Replays, StepEstimate, peak_bytes, shadow_bytes
from oobleck.planner.cost.kinds import Cut, Kind, replicas, template_cut
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stages import (
    Floats,
    Integers,
    PipelineCost,
    Stages,
    StageTable,
    pipeline_cost,
    stage_cost,
)
from oobleck.planner.programs.communicators import MOST_COMMUNICATORS, most_links
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.programs.compiler.schedule import in_flight, splits_backward
from oobleck.planner.search.partition import Bounds, Sweep, swept_together
from oobleck.planner.search.trace import trace

# ---- Choice of the cuts of least T that become templates: those with the shortest replays.
#
# T1 + T2 + T3 ignores messages and which stages beside the slowest are short. So many cuts have
# the same T (in a model of equal blocks nearly always) but different step times. Owns that
# choice. Sampling draws from a fixed seed: the same profile gives the same templates.


#: Cuts that are drawn for each number of nodes, beside the one that the search found.
_SAMPLES = 5
#: Micro-batches per stage of a replay: enough to fill, run and drain.
_MICROBATCHES = 2
#: Templates of a size for the first plan to choose among.
_SHORTLISTED = 3
#: Most links of a worker beside its stage's communicator and one for sums.
_MOST_LINKS = MOST_COMMUNICATORS - 2


def equal_cuts(
    table: StageTable, fewest: Integers, found: Mapping[int, tuple[float, Stages]]
) -> Mapping[int, tuple[Stages, ...]]:
    """Return for each number of nodes the cut found for it, first, and others of the same T and the
    same slowest stage. `found` has T with its cut."""
    slowest = {n: max(table.stage_time(*stage) for stage in cut) for n, (_, cut) in found.items()}
    ties = {n: {cut: None} for n, (_, cut) in found.items()}
    sample = np.random.default_rng(0)
    sizes = np.array(sorted(found, key=lambda n: (slowest[n], n)), dtype=np.int64)
    while len(sizes):
        rows = np.array([slowest[n] for n in sizes.tolist()])
        count = swept_together(table, rows, sizes)
        for nodes, total, cut in _drawn(table, fewest, rows[:count], sizes[:count], sample):
            if total == found[nodes][0]:
                ties[nodes][cut] = None
        sizes = sizes[count:]
    return {nodes: tuple(cuts) for nodes, cuts in ties.items()}


def _drawn(
    table: StageTable,
    fewest: Integers,
    slowest: Floats,
    sizes: Integers,
    sample: np.random.Generator,
) -> Iterator[tuple[int, float, Stages]]:
    """Yield cuts of least T for each size and its slowest stage: number of nodes, T and cut."""
    times = np.unique(slowest)
    bounds = Bounds(low=times, high=times, after=times - 1)
    sweep = Sweep(table, fewest, bounds, nodes=int(sizes.max()), least=int(sizes.min()))
    queries = np.repeat(sizes, _SAMPLES)
    cuts = trace(sweep, np.repeat(np.searchsorted(times, slowest), _SAMPLES), queries, sample)
    for number, total in enumerate(cuts.totals().tolist()):
        yield int(queries[number]), total, cuts.stages(number)


class Costed:
    """Template with its costs, each computed once when first needed."""

    def __init__(self, template: PipelineTemplate, profile: Profile) -> None:
        self.template, self._profile = template, profile

    @cached_property
    def cost(self) -> PipelineCost:
        return pipeline_cost(self.template, self._profile)

    @cached_property
    def cut(self) -> Cut:
        return template_cut(self.template, self._profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Templates of one size and of least T; `quickest` and `found` may be the same."""

    #: Template whose pipeline ends first with micro-batches for all its stages.
    quickest: Costed
    #: First template that the search found.
    found: Costed
    #: Next quickest ones.
    others: tuple[Costed, ...] = ()

    @property
    def all(self) -> tuple[Costed, ...]:
        return tuple(dict.fromkeys((self.quickest, self.found, *self.others)))


def shortlists(candidates: Sequence[Sequence[Costed]]) -> list[Shortlist]:
    """Return the templates of each group, of one size and of equal T, that are worth a closer look.

    Which one suits a plan also depends on its shares of the batch and on the other pipelines. Those
    with too many links for NCCL come last.
    """
    kinds = [
        [Kind(_MICROBATCHES * len(each.template.stages), each.cut) for each in group]
        if len(group) > 1
        else []
        for group in candidates
    ]
    times = computed_s(("1f1b", kind) for group in kinds for kind in group)
    chosen = []
    for group, own in zip(candidates, kinds, strict=True):
        done = [max(times["1f1b", kind]) for kind in own] or [0.0]
        many = [
            most_links([stage.gpus for stage in each.template.stages]) > _MOST_LINKS
            for each in group
        ]
        order = [at for *_, at in sorted(zip(many, done, range(len(group)), strict=True))]
        few = list(dict.fromkeys((order[0], 0, *order[1:])))[:_SHORTLISTED]
        chosen.append(
            Shortlist(
                quickest=group[order[0]],
                found=group[0],
                others=tuple(group[at] for at in few if at not in (order[0], 0)),
            )
        )
    return chosen


#: Least gain, as a share of the step, for leaving 1F1B. Splitting the backward was measured to cost
#: 0.5 % of the step in wide layers and 7 % in narrow ones; profiles lack that cost.
TIE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """Schedule of a plan, the reason, and the estimates of all candidates."""

    schedule: Schedule
    reason: str
    estimates: Mapping[Schedule, StepEstimate]

    @property
    def step_s(self) -> float:
        return self.estimates[self.schedule].step_s


def choose_schedule(
    plan: Plan,
    profile: Profile,
    *,
    tied: Ties = False,
    wanted: Schedule | None = None,
) -> ScheduleChoice:
    """Return the schedule of least step time among those whose peak memory fits on every worker.

    Ties go to 1F1B. So does a plan for which nothing fits, since 1F1B keeps least. `tied`: groups
    of layers that share parameters. `wanted` is chosen if given; raises PlanInfeasible where it
    does not fit.
    """
    (estimates,) = Replays(profile, tied=tied).estimates([plan], SCHEDULES)
    return choose_among(estimates, profile, wanted)


def choose_among(
    estimates: Mapping[Schedule, StepEstimate], profile: Profile, wanted: Schedule | None
) -> ScheduleChoice:
    """Choose likewise for a plan with these estimates under all schedules."""
    limit = profile.gpu_memory_bytes
    fitting = [s for s in SCHEDULES if estimates[s].peak_bytes <= limit]
    if wanted is not None:
        return ScheduleChoice(
            schedule=wanted, reason=_wanted(wanted, estimates, limit), estimates=estimates
        )
    best: Schedule = "1f1b"  # if 1F1B does not fit, none does
    for schedule in fitting:
        if estimates[schedule].step_s < estimates[best].step_s * (1 - TIE):
            best = schedule
    return ScheduleChoice(
        schedule=best, reason=_reason(best, fitting, estimates, limit), estimates=estimates
    )


def settled(plan: Plan, profile: Profile) -> Plan:
    """Return `plan` in its final form, with `with_residents`, and proven. Raises ProgramDeadlock,
    which is an error of ours."""
    final = with_residents(plan, profile)
    prove(final)
    return final


def with_residents(plan: Plan, profile: Profile) -> Plan:
    """Return `plan`, of templates, with all stages of several workers resident whose memory beside
    shadows allows it."""
    shadows = shadow_bytes(plan, profile)
    resident = {
        stage.workers
        for pipeline in plan.pipelines
        for number, stage in enumerate(pipeline.stages)
        if len(stage.workers) > 1 and _has_room(plan, pipeline, number, profile, shadows)
    }
    holds = tuple(replace(hold, resident=hold.workers in resident) for hold in plan.holds)
    return replace(plan, holds=holds)


def _has_room(
    plan: Plan,
    pipeline: Pipeline,
    number: int,
    profile: Profile,
    shadows: Mapping[WorkerId, int],
) -> bool:
    stage = pipeline.stages[number]
    cost = stage_cost(
        profile, stage.first_layer, stage.last_layer, len(stage.workers), resident=True
    )
    kept = in_flight(
        plan.schedule,
        stages=len(pipeline.stages),
        stage=number,
        microbatches=pipeline.microbatches,
    )
    most = max(shadows.get(worker, 0) for worker in stage.workers)
    needed = cost.worker_bytes(kept, replicas=replicas(plan)) + most
    return needed <= profile.gpu_memory_bytes


def keep_schedule(plan: Plan, profile: Profile) -> Plan:
    """Return `plan` under its schedule where memory allows it, else under 1F1B, which keeps least.

    This is for a plan that is needed at once: it considers only memory.
    """
    if plan.schedule == "1f1b" or peak_bytes(plan, profile) <= profile.gpu_memory_bytes:
        return plan
    return replace(plan, schedule="1f1b")


def _wanted(schedule: Schedule, estimates: Mapping[Schedule, StepEstimate], limit: int) -> str:
    needed = estimates[schedule].peak_bytes
    if schedule != "1f1b" and needed > limit:
        raise PlanInfeasible(
            f"pipeline_schedule {schedule} needs {format_bytes(needed)} on some worker, which has "
            f"{format_bytes(limit)}; leave it out, or use 1f1b or a smaller microbatch"
        )
    return f"{schedule}: as asked for"


def _reason(
    best: Schedule,
    fitting: list[Schedule],
    estimates: Mapping[Schedule, StepEstimate],
    limit: int,
) -> str:
    clauses = []
    if not fitting:
        clauses.append("keeps least of all; none fits")
    for schedule in SCHEDULES:
        if schedule == best:
            continue
        estimate = estimates[schedule]
        if schedule not in fitting:
            clauses.append(
                f"{schedule} needs {format_bytes(estimate.peak_bytes)} of {format_bytes(limit)}"
            )
            continue
        clauses.append(_compared(best, schedule, estimates))
    return f"{best}: {', '.join(clauses)}"


def _compared(best: Schedule, other: Schedule, estimates: Mapping[Schedule, StepEstimate]) -> str:
    """Describe by how much `best` is faster than another one that fits, or why it is preferred
    anyway."""
    taken, left = estimates[best].step_s, estimates[other].step_s
    figure = f"{100 * abs(left - taken) / max(left, taken, 1e-300):.1f}%"
    if figure == "0.0%":
        return f"as fast as {other}"
    if taken < left:
        return f"{figure} faster than {other}"
    split = splits_backward(other)
    why = "splitting the backward may cost as much" if split else "too little to count"
    return f"{other} is {figure} faster but {why}"

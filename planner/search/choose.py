"""Choice of a plan's schedule: the fastest of those that fit the memory.

Owns the comparison, the choice of stages whose workers keep gathered weights for a whole step, and
the last step of every plan, its proof (`settled`). `oobleck.planner.cost.estimate` owns the step
time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.ties import Ties
from oobleck.core.units import format_bytes
from oobleck.planner.cost.estimate import (
    SPLITTING_TIE,
    Replays,
    StepEstimate,
    peak_bytes,
    shadow_bytes,
)
from oobleck.planner.cost.kinds import replicas
from oobleck.planner.cost.stages import stage_cost
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.programs.compiler.schedule import in_flight, splits_backward


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

    Ties go to 1F1B. A plan that fits under no schedule gets 1F1B too, since it keeps least. `tied`:
    groups of layers that share parameters. A `wanted` schedule is chosen, or PlanInfeasible is
    raised where it does not fit.
    """
    (estimates,) = Replays(profile, tied=tied).estimates([plan], SCHEDULES)
    return choose_among(estimates, profile, wanted)


def choose_among(
    estimates: Mapping[Schedule, StepEstimate], profile: Profile, wanted: Schedule | None
) -> ScheduleChoice:
    """Choose as `choose_schedule`, for a plan with these estimates under all schedules."""
    limit = profile.gpu_memory_bytes
    fitting = [s for s in SCHEDULES if estimates[s].peak_bytes <= limit]
    if wanted is not None:
        return ScheduleChoice(
            schedule=wanted, reason=_wanted(wanted, estimates, limit), estimates=estimates
        )
    best: Schedule = "1f1b"  # if 1F1B does not fit, none does
    for schedule in fitting:
        if estimates[schedule].step_s < estimates[best].step_s * (1 - SPLITTING_TIE):
            best = schedule
    return ScheduleChoice(
        schedule=best, reason=_reason(best, fitting, estimates, limit), estimates=estimates
    )


def settled(plan: Plan, profile: Profile) -> Plan:
    """Return `plan` in its final form: with resident stages, and proven free of deadlock. Raises
    ProgramDeadlock, an internal error."""
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
    if all(hold.resident == (hold.workers in resident) for hold in plan.holds):
        return plan
    holds = (structs.replace(one, resident=one.workers in resident) for one in plan.holds)
    return replace(plan, holds=tuple(holds))


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

    It considers only memory, so it is quick enough for a plan that is needed at once.
    """
    if plan.schedule == "1f1b" or peak_bytes(plan, profile) <= profile.gpu_memory_bytes:
        return plan
    return plan.having(schedule="1f1b")


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

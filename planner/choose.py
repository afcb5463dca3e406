"""Which schedule a plan should run under: the fastest of those that fit the memory.

Owns the comparison. What a step takes is `oobleck.planner.steptime`'s to say.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.planner.plan import Plan, Schedule
from oobleck.planner.profile import Profile
from oobleck.planner.steptime import StepEstimate, estimate_schedules
from oobleck.planner.units import format_bytes

#: In the order of preference: 1F1B keeps least and needs no split backward.
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "zb-h1", "gpipe")

#: A schedule that is faster by less than this share of the step is not worth leaving 1F1B for:
#: profiles are not that exact.
TIE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """The schedule for a plan, why, and what each of the candidates would take."""

    schedule: Schedule
    reason: str
    estimates: Mapping[Schedule, StepEstimate]


def choose_schedule(plan: Plan, profile: Profile, *, tied: bool = False) -> ScheduleChoice:
    """The schedule of least step time among those whose peak memory fits on every worker.

    Ties go to 1F1B; so does a plan for which nothing fits, since it keeps least. `tied`: the head
    shares layer 0's token embedding. Takes three estimates of the step, each in
    O(pipelines + kinds of pipelines x stages x micro-batches of one).
    """
    estimates = estimate_schedules(plan, profile, SCHEDULES, tied=tied)
    limit = profile.gpu_memory_bytes
    fitting = [s for s in SCHEDULES if estimates[s].peak_bytes <= limit]
    best: Schedule = "1f1b"  # where it does not fit, none does
    for schedule in fitting:
        if estimates[schedule].step_s < estimates[best].step_s * (1 - TIE):
            best = schedule
    return ScheduleChoice(
        schedule=best, reason=_reason(best, fitting, estimates, limit), estimates=estimates
    )


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
        gain = 1 - estimates[best].step_s / estimate.step_s
        clauses.append(
            f"{100 * gain:.1f}% faster than {schedule}" if gain > TIE else f"as fast as {schedule}"
        )
    return f"{best}: {', '.join(clauses)}"

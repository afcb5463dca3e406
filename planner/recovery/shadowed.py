"""Behind an answer: plans in which more nodes hold each layer. Must not know who holds what."""

from dataclasses import replace

from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Plan
from oobleck.planner.recovery.answer import Answer, Change, answer, idle
from oobleck.planner.recovery.reconfigure import Reconfiguration, can_lose
from oobleck.planner.recovery.rules import Next
from oobleck.planner.search.choose import settled
from oobleck.planner.search.shadows import with_shadows
from oobleck.planner.units import comma_separated, count


def shadows_behind(plan: Plan, change: Change) -> Next | None:
    """What follows `plan` at a step boundary, if more shadows would let more nodes be lost."""
    tolerated = change.fault_tolerance
    if not change.shadows or _more_shadows(plan, change.profile, tolerated) is plan:
        return None
    return "shadow"


def can_lose_behind(plan: Plan, change: Change) -> int:
    """How many nodes can be lost once `plan` has the shadows that follow it."""
    if not change.shadows:
        return can_lose(plan)
    return can_lose(_more_shadows(plan, change.profile, change.fault_tolerance))


def shadowed(change: Change) -> Answer:
    """The running plan with all shadows that let more nodes be lost; its routes and schedule stay.
    For a step boundary. Raises PlanInfeasible where there are none to add."""
    profile = change.profile
    found = _more_shadows(change.plan, profile, change.fault_tolerance)
    if found is change.plan:
        raise PlanInfeasible("no layer can be on one node more, or none has to be")
    plan = settled(replace(found, generation=change.generation), profile)
    nodes = sorted({worker.node for worker in plan.shadows})
    made = Reconfiguration(
        plan=plan,
        rule="shadow",
        reason=f"{comma_separated(nodes)} hold layers of others too, so that "
        f"{count(can_lose(plan), 'node')} can be lost",
        idle=idle(change, plan),
    )
    step_s = estimate_step(plan, profile, tied=change.tied).step_s
    return answer("shadow", made, step_s, change)


def _more_shadows(plan: Plan, profile: Profile, fault_tolerance: int) -> Plan:
    return with_shadows(plan, profile, fault_tolerance=fault_tolerance, held=plan.shards)

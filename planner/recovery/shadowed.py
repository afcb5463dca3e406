"""Shadows after an answer: plans in which more nodes hold each layer.

List-scheduled workers may need an order that takes less memory for that. Owns how much memory they
keep. Must not know holders.
"""

from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import Plan
from oobleck.core.units import comma_separated, count
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.recovery.answer import Answer, Change, answer, idle
from oobleck.planner.recovery.reconfigure import Reconfiguration, can_lose
from oobleck.planner.recovery.rules import Next
from oobleck.planner.recovery.worth import LEAST_GAIN
from oobleck.planner.search.choose import settled
from oobleck.planner.search.shadows import with_shadows

#: Least share of the memory of micro-batches that list-scheduled workers keep, in the order of
#: trying. An order is made for speed alone and often keeps more than it needs.
_KEPT = (1.0, 0.5, 0.25)


def shadows_behind(plan: Plan, change: Change) -> Next | None:
    """Return the follow-up of `plan` at a step boundary if more shadows would let more nodes be
    lost; else None. A loss waits for this, so orders with less memory are tried only after it."""
    if not change.shadows:
        return None
    found = _more_shadows(plan, change, change.fault_tolerance, _KEPT[-1])
    return None if found is plan else "shadow"


def can_lose_behind(plan: Plan, change: Change) -> int:
    """Return how many nodes can be lost once `plan` has the shadows that follow it."""
    if not change.shadows:
        return can_lose(plan)
    return can_lose(_more_shadows(plan, change, change.fault_tolerance))


def shadowed(change: Change) -> Answer:
    """Answer, for a step boundary, with the running plan and all shadows that let more nodes be
    lost.

    Its routes and schedule stay. Raises PlanInfeasible where there are none to add.
    """
    profile = change.profile
    plan = replace(_with_more(change), generation=change.generation)
    if plan.listing is None:
        plan = settled(plan, profile)
        step_s = estimate_step(plan, profile, tied=change.tied).step_s
    else:
        prove(plan)
        step_s = estimate_listed(plan, profile, tied=change.tied).step_s
    nodes = sorted({worker.node for worker in plan.shadows})
    made = Reconfiguration(
        plan=plan,
        rule="shadow",
        reason=f"{comma_separated(nodes)} hold layers of others too, so that "
        f"{count(can_lose(plan), 'node')} can be lost",
        idle=idle(change, plan),
    )
    return answer("shadow", made, step_s, change)


def _more_shadows(plan: Plan, change: Change, wanted: int, kept: float = 1.0) -> Plan:
    held = plan.shards
    return with_shadows(plan, change.profile, fault_tolerance=wanted, held=held, kept=kept)


def _with_more(change: Change) -> Plan:
    """Return the running plan with more shadows. The order of list-scheduled workers stays where it
    fits beside them; else it is made anew. Raises PlanInfeasible."""
    plan, listed = change.plan, change.plan.listing is not None
    most = min(change.fault_tolerance, len(plan.nodes) - 1)
    why = "no layer can be on one node more, or none has to be"
    for wanted in range(most, can_lose(plan), -1):
        for kept in _KEPT if listed else _KEPT[:1]:
            found = _more_shadows(plan, change, wanted, kept)
            if can_lose(found) < wanted:
                continue
            if kept == 1.0:
                return found
            anew = _listed_anew(found, change)
            if anew is not None:
                return anew
            why = (
                "beside shadows that let one node more be lost there is so little memory for "
                "micro-batches that a step would take longer"
            )
    raise PlanInfeasible(why)


def _listed_anew(found: Plan, change: Change) -> Plan | None:
    """List the plan anew in an order that fits into the memory beside the shadows.

    Returns None where some micro-batch has no room, or a step would take longer by more than the
    least gain of a change.
    """
    assert found.listing is not None, "its workers are list-scheduled"
    anew = with_listing(found, change.profile, split=found.listing.split)
    try:
        step_s, before_s = (
            estimate_listed(plan, change.profile, tied=change.tied).step_s for plan in (anew, found)
        )
    except PlanInfeasible:
        return None
    return anew if step_s <= before_s * (1 + LEAST_GAIN) else None

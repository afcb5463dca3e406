"""Policies that answer a change of the nodes, and the choice among them.

- `templates` (Oobleck §5): a plan of templates for the live nodes; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; no state moves, so training continues at once. `normalise` (also there) then moves one
  stage, so that holes are at different layers.
- `uneven` (Malleus): where no node is lost, by the current speed of each worker.
- `shadow` (Bamboo, NSDI 2023) answers no loss itself. After an answer, nodes get copies of layers
  that too few hold, and `reroute` uses them at the next loss.

Owns the choice. Must not know how a policy makes its plan.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from oobleck.core.errors import PlanInfeasible
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.planner.recovery.answer import Answer, Change, Policy
from oobleck.planner.recovery.lost import by_reroute, by_templates
from oobleck.planner.recovery.normalise import normalised, promising
from oobleck.planner.recovery.shadowed import shadowed, shadows_behind

#: Time of moving state below which it is moved at once.
QUICK_S = 1.0
_TEMPLATES_FIRST: tuple[Policy, Policy] = ("templates", "reroute")
_REROUTE_FIRST: tuple[Policy, Policy] = ("reroute", "templates")
#: Answer of each policy to a change, or its refusal.
Answers = Mapping[Policy, Answer | PlanInfeasible]


def answer(change: Change, wanted: RecoveryPolicy, known: Answers | None = None) -> Answer:
    """Decide the answer to a change. `known`: `answers(change)`, for a caller that has it already.

    With `auto`, a loss whose state moves in less than a second is answered by `templates`. Else
    `reroute` answers at once and `templates` follows, as far as both are possible. Where the job
    names `reroute`, `normalise` follows if it promises a shorter step, and `shadow` after that.

    If the preferred policy has no answer the other one is used, and the reason says so. Fewer nodes
    than templates need may hold all layers, some as shadows. Raises PlanInfeasible where there is
    no answer.
    """
    lost = not frozenset(change.live).issuperset(change.plan.nodes)
    first, other = _REROUTE_FIRST if wanted == "reroute" and lost else _TEMPLATES_FIRST
    try:
        found = _made(first, change, known)
    except PlanInfeasible as infeasible:
        return _instead(other, first, infeasible, change, known)
    if first == "reroute" and promising(change, found.found.plan):
        return replace(found, then="normalise")
    if wanted == "auto" and found.stall_s >= QUICK_S:
        with suppress(PlanInfeasible):
            return replace(_made("reroute", change, known), then="templates")
    return found


def _instead(
    other: Policy, first: Policy, why: PlanInfeasible, change: Change, known: Answers | None
) -> Answer:
    """Answer by the other policy, with the first one's refusal in the reason. Where both refuse,
    the error of `templates` is raised, since an operator can act on that."""
    try:
        found = _made(other, change, known)
    except PlanInfeasible as infeasible:
        raise (infeasible if other == "templates" else why) from None
    reason = f"{found.found.reason}; not by {first}: {why}"
    return replace(found, found=replace(found.found, reason=reason))


def behind(change: Change, wanted: Literal["shadow", "normalise"]) -> Answer:
    """Return the follow-up of an answer at a step boundary; shadows also where no stage is worth
    moving. Raises PlanInfeasible."""
    if wanted == "shadow":
        return shadowed(change)
    try:
        return normalised(change)
    except PlanInfeasible:
        if shadows_behind(change.plan, change) is not None:
            with suppress(PlanInfeasible):
                return shadowed(change)
        raise


def answers(change: Change) -> Answers:
    """Return every policy's own answer, or its refusal."""
    found: dict[Policy, Answer | PlanInfeasible] = {}
    for policy, make in _MAKERS.items():
        try:
            found[policy] = make(change)
        except PlanInfeasible as infeasible:
            found[policy] = infeasible
    return found


def _made(policy: Policy, change: Change, known: Answers | None) -> Answer:
    found = known[policy] if known is not None else _MAKERS[policy](change)
    if isinstance(found, PlanInfeasible):
        raise found
    return found


_MAKERS: Mapping[Policy, Callable[[Change], Answer]] = {
    "templates": by_templates,
    "reroute": by_reroute,
}

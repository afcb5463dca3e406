"""Ways to go on after a change of the nodes, by the idea that they stand on, and which is taken.

- `templates` (Oobleck §5): a plan of templates for the nodes that live; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; nothing moves, so training goes on at once.
- `uneven` (Malleus): where nobody is lost, by how fast each worker is now.
- `shadow` (Bamboo, NSDI 2023) answers no loss itself: behind an answer, nodes get copies of layers
  that too few hold, and `reroute` finds them at the next loss.

Owns the choice. Must not know how a policy comes to its plan.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.job.spec import RecoveryPolicy
from oobleck.planner.recovery.answer import Answer, Change, Policy
from oobleck.planner.recovery.lost import by_reroute, by_templates

#: State that moves in less than this is moved at once.
QUICK_S = 1.0


def answer(change: Change, wanted: RecoveryPolicy) -> Answer:
    """What is done about a change.

    `auto`: a loss whose state moves in less than a second is answered by `templates`; else by
    `reroute` at once and by `templates` behind it, as far as both are possible. Where `reroute` is
    wanted by name and has no answer to a loss, `templates` takes its place and the reason says why.
    Raises PlanInfeasible where there is no answer.
    """
    if wanted == "reroute" and not frozenset(change.live).issuperset(change.plan.nodes):
        try:
            return by_reroute(change)
        except PlanInfeasible as infeasible:
            found = by_templates(change)
            reason = f"{found.found.reason}; not by reroute: {infeasible}"
            return replace(found, found=replace(found.found, reason=reason))
    try:
        found = by_templates(change)
    except PlanInfeasible:
        if wanted == "templates" or not change.shadows:
            raise
        # Fewer nodes than templates need may hold all layers as shadows.
        with suppress(PlanInfeasible):
            return by_reroute(change)
        raise
    if wanted == "auto" and found.stall_s >= QUICK_S:
        with suppress(PlanInfeasible):
            return replace(by_reroute(change), then="templates")
    return found


def answers(change: Change) -> Mapping[Policy, Answer | PlanInfeasible]:
    """Every policy's own answer, or why it has none."""
    found: dict[Policy, Answer | PlanInfeasible] = {}
    for policy, make in _MAKERS.items():
        try:
            found[policy] = make(change)
        except PlanInfeasible as infeasible:
            found[policy] = infeasible
    return found


_MAKERS: Mapping[Policy, Callable[[Change], Answer]] = {
    "templates": by_templates,
    "reroute": by_reroute,
}

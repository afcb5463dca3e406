"""Ways to go on after a change of the nodes, by the idea that they stand on, and which is taken.

- `templates` (Oobleck §5): a plan of templates for the nodes that live; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; nothing moves, so training goes on at once. `normalise` (as there) moves one stage behind
  it, so that holes are at different layers.
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
from oobleck.planner.recovery.normalise import promising

#: State that moves in less than this is moved at once.
QUICK_S = 1.0
#: What each policy has to say about a change.
Answers = Mapping[Policy, Answer | PlanInfeasible]


def answer(change: Change, wanted: RecoveryPolicy, known: Answers | None = None) -> Answer:
    """What is done about a change. `known`: `answers(change)`, for whoever has that already.

    `auto`: a loss whose state moves in less than a second is answered by `templates`; else by
    `reroute` at once and by `templates` behind it, as far as both are possible. Where `reroute` is
    wanted by name, `normalise` follows if that promises a shorter step; where it has no answer to a
    loss, `templates` takes its place and the reason says why.
    Raises PlanInfeasible where there is no answer.
    """
    if wanted == "reroute" and not frozenset(change.live).issuperset(change.plan.nodes):
        try:
            found = _made("reroute", change, known)
        except PlanInfeasible as infeasible:
            found = _made("templates", change, known)
            reason = f"{found.found.reason}; not by reroute: {infeasible}"
            return replace(found, found=replace(found.found, reason=reason))
        if found.then is None and promising(change, found.found.plan):
            return replace(found, then="normalise")
        return found
    try:
        found = _made("templates", change, known)
    except PlanInfeasible:
        if wanted == "templates" or not change.shadows:
            raise
        # Fewer nodes than templates need may hold all layers as shadows.
        with suppress(PlanInfeasible):
            return _made("reroute", change, known)
        raise
    if wanted == "auto" and found.stall_s >= QUICK_S:
        with suppress(PlanInfeasible):
            return replace(_made("reroute", change, known), then="templates")
    return found


def answers(change: Change) -> Answers:
    """Every policy's own answer, or why it has none."""
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

"""Report of `oobleck plan --lost`: what is done about each loss and what comes behind it, beside
what each policy would do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.planner.recovery.answer import Answer, Change
from oobleck.planner.recovery.lost import by_templates
from oobleck.planner.recovery.policies import Answers, answer, answers, behind
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Next
from oobleck.planner.report.shape import shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """Follow-up that was to come behind an answer, at a step boundary."""

    wanted: Next
    found: Answer | PlanInfeasible

    def data(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        if isinstance(self.found, PlanInfeasible):
            return {"policy": self.wanted, **_answer(self.found)}
        made = self.found.found
        told = {"policy": self.found.policy, "rule": made.rule, "reason": made.reason}
        return told | _answer(self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss of a node, and what follows it."""

    node: NodeName
    #: Those that are left.
    live: tuple[NodeName, ...]
    #: What is done; None: nothing can be, and the reason says what is missing.
    taken: Answer | None
    reason: str
    #: What each policy would do, or why it cannot.
    answers: Answers
    #: Behind what is done, one after the other.
    follow_ups: tuple[FollowUp, ...] = ()

    def data(self, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return it as plain data, for JSON. `plan`: the one that is taken, likewise."""
        taken = self.taken
        return {
            "lost": self.node,
            "policy": None if taken is None else taken.policy,
            "then": None if taken is None else taken.then,
            "rule": None if taken is None else taken.found.rule,
            "reason": self.reason,
            "plan": plan,
            "policies": {policy: _answer(each) for policy, each in self.answers.items()},
            "follow_ups": [each.data() for each in self.follow_ups],
        }


def losses(asked: Change, policy: RecoveryPolicy, lost: int) -> Iterator[Loss]:
    """Yield what follows each of so many losses of the first pipeline's last node, until nothing
    fits.

    Each comes in the plan that answers the one before, ahead of what follows that. Idle nodes take
    part where they can. `asked`: of the first plan, before anything happens.
    """
    change, live = asked, list(asked.live)
    for _ in range(lost):
        gone = next(n for p in change.base.pipelines for n in reversed(p.nodes) if n in live)
        live.remove(gone)
        change = replace(change, live=tuple(live))
        each = answers(change)
        try:
            taken = answer(change, policy, each)
        except PlanInfeasible as infeasible:
            reason = str(infeasible)
            yield Loss(node=gone, live=change.live, taken=None, reason=reason, answers=each)
            return
        change = _after(change, taken)
        yield Loss(
            node=gone,
            live=change.live,
            taken=taken,
            reason=taken.found.reason,
            answers=each,
            follow_ups=tuple(_follow_ups(change, taken.then)),
        )


def _follow_ups(change: Change, then: Next | None) -> Iterator[FollowUp]:
    """`change`: of the plan that they follow, in which nothing has happened since."""
    while then is not None:
        try:
            found = by_templates(change) if then == "templates" else behind(change, then)
        except PlanInfeasible as infeasible:
            yield FollowUp(wanted=then, found=infeasible)
            return
        yield FollowUp(wanted=then, found=found)
        change, then = _after(change, found), found.then


def _after(change: Change, taken: Answer) -> Change:
    """Return the next change, of the plan that is taken, in which nothing has happened yet. The
    next plan of templates starts from its pipelines, or from those that it left as they are."""
    plan, base = taken.found.plan, change.base
    if taken.policy == "templates" or (taken.policy == "shadow" and base is change.plan):
        base = plan
    return replace(change, plan=plan, base=base, generation=Generation(plan.generation + 1))


def _answer(each: Answer | PlanInfeasible) -> dict[str, Any]:
    if isinstance(each, PlanInfeasible):
        return {"refused": str(each)}
    return {
        "step_s": each.step_s,
        "moved_bytes": each.moved_bytes,
        "stall_s": each.stall_s,
        "can_lose": can_lose(each.found.plan),
        "plan": shape(each.found.plan),
    }

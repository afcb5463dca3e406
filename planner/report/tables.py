"""Report of `oobleck plan --lost`: the answer to each loss and its follow-ups, beside each policy's
own answer.

Also owns the table of `oobleck plan --slow`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.planner.recovery.answer import Answer, Change
from oobleck.planner.recovery.chooser import choose
from oobleck.planner.recovery.course import behind_answer
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.recovery.policies import Answers, answer, answers, around_slow, ask
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Next, Rule
from oobleck.planner.recovery.terms import after
from oobleck.planner.recovery.uneven.answer import by_rates
from oobleck.planner.report.drawing import shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """Follow-up intended after an answer, at a step boundary."""

    wanted: Next
    answer: Answer | PlanInfeasible

    def data(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        if isinstance(self.answer, PlanInfeasible):
            return {"policy": self.wanted, **answer_data(self.answer)}
        made = self.answer.found
        fields = {"policy": self.answer.policy, "rule": made.rule, "reason": made.reason}
        return fields | answer_data(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Loss of a node, and the answer to it."""

    node: NodeName
    #: Remaining nodes.
    live: tuple[NodeName, ...]
    #: Answer; None: none is possible, and the reason says what is missing.
    taken: Answer | None
    reason: str
    #: Answer of each policy, or its refusal.
    answers: Answers
    #: Follow-ups in order.
    follow_ups: tuple[FollowUp, ...] = ()

    def data(self, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return it as plain data, for JSON. `plan`: plain data of the new plan."""
        taken = self.taken
        # The taken answer may have the shape of a first plan, or be of another policy.
        told = self.answers if taken is None else {**self.answers, taken.policy: taken}
        return {
            "lost": self.node,
            "policy": None if taken is None else taken.policy,
            "then": None if taken is None else taken.then,
            "rule": None if taken is None else taken.found.rule,
            "reason": self.reason,
            "plan": plan,
            "policies": {policy: answer_data(each) for policy, each in told.items()},
            "follow_ups": [each.data() for each in self.follow_ups],
        }


def losses(asked: Change, policy: RecoveryPolicy, lost: int, outlook: Outlook) -> Iterator[Loss]:
    """Yield the results of losing the first pipeline's last node, up to `lost` times or until
    nothing fits.

    Each loss hits the plan that answers the one before, ahead of its follow-ups. Idle nodes take
    part where they can. `asked` describes the first plan, before any loss.
    """
    change, live = asked, list(asked.live)
    for _ in range(lost):
        gone = next(n for p in change.base.pipelines for n in reversed(p.nodes) if n in live)
        live.remove(gone)
        change = replace(change, live=tuple(live))
        each = answers(change)
        try:
            taken = answer(change, policy, outlook)
        except PlanInfeasible as infeasible:
            reason = str(infeasible)
            yield Loss(node=gone, live=change.live, taken=None, reason=reason, answers=each)
            return
        change = after(change, taken)
        yield Loss(
            node=gone,
            live=change.live,
            taken=taken,
            reason=taken.found.reason,
            answers=each,
            follow_ups=tuple(_follow_ups(change, taken.then, outlook)),
        )


def _follow_ups(change: Change, then: Next | None, outlook: Outlook) -> Iterator[FollowUp]:
    """Yield the follow-ups of a plan. `change`: of that plan, before any further loss."""
    while then is not None:
        try:
            answer = choose(ask(change, behind_answer(then)), outlook)
        except PlanInfeasible as infeasible:
            yield FollowUp(wanted=then, answer=infeasible)
            return
        yield FollowUp(wanted=then, answer=answer)
        change, then = after(change, answer), answer.then


def answer_data(each: Answer | PlanInfeasible) -> dict[str, Any]:
    """Return an answer, or a refusal, as plain data."""
    if isinstance(each, PlanInfeasible):
        return {"refused": str(each)}
    return {
        "step_s": each.step_s,
        "moved_bytes": each.moved_bytes,
        "stall_s": each.stall_s,
        "can_lose": can_lose(each.found.plan),
        "plan": shape(each.found.plan),
    }


# ---- Report of `oobleck plan --slow`: the plans for slow workers side by side.


_SLOW = re.compile(r"(?P<node>[^/=]+)(/(?P<slot>[0-9]{1,9}))?=(?P<rate>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Step times and answers where some workers are slow."""

    rates: Mapping[WorkerId, float]
    #: Seconds of a step with all workers as fast as profiled, and of the running plan's at `rates`.
    healthy_s: float
    staying_s: float
    answers: Sequence[Answer]
    #: Rule of the answer; None: the running plan stays.
    taken: Rule | None
    reason: str

    def data(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return {
            "rates": {str(worker): rate for worker, rate in self.rates.items()},
            "step_s": self.staying_s,
            "relative": self._relative(self.staying_s),
            "taken": self.taken,
            "reason": self.reason,
            "candidates": [
                {
                    "rule": one.found.rule,
                    "step_s": one.step_s,
                    "relative": self._relative(one.step_s),
                    "moved_bytes": one.moved_bytes,
                    "stall_s": one.stall_s,
                    "can_lose": can_lose(one.found.plan),
                    "plan": shape(one.found.plan),
                }
                for one in self.answers
            ],
        }

    def _relative(self, step_s: float) -> float:
        return step_s / self.healthy_s if self.healthy_s else 1.0


def read_rates(
    texts: Sequence[str], nodes: Sequence[NodeName], workers_per_node: int
) -> dict[WorkerId, float]:
    """Parse the rates of workers: `NODE=RATE` for all workers of the node, `NODE/SLOT=RATE` for
    one. Raises ValueError."""
    rates: dict[WorkerId, float] = {}
    for text in texts:
        match = _SLOW.fullmatch(text)
        if match is None:
            raise ValueError(f"slow is {text!r}; give NODE=RATE or NODE/SLOT=RATE, as n1=0.5")
        node = NodeName(match["node"])
        if node not in nodes:
            raise ValueError(f"slow names node {node!r}; the nodes are {nodes[0]} to {nodes[-1]}")
        slots = range(workers_per_node)
        if match["slot"] is not None:
            if int(match["slot"]) not in slots:
                raise ValueError(
                    f"slow names {node}/{match['slot']}; slots are 0 to {workers_per_node - 1}"
                )
            slots = range(int(match["slot"]), int(match["slot"]) + 1)
        rate = _rate(match["rate"])
        rates.update((WorkerId(node, slot), rate) for slot in slots)
    return dict(sorted(rates.items()))


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise ValueError(
            f"slow has the rate {text!r}; give the share of the profiled speed, above 0 and at "
            "most 1"
        )
    return rate


def slowness(change: Change, healthy_s: float) -> Slowness:
    """Find the answer to the rates of `change`, and all possible ones."""
    staying_s, answers = by_rates(change)
    taken: Rule | None = None
    try:
        best = choose(around_slow(change), Outlook()).found
        taken, reason = best.rule, best.reason
    except PlanInfeasible as infeasible:
        reason = str(infeasible)
    return Slowness(
        rates=change.rates,
        healthy_s=healthy_s,
        staying_s=staying_s,
        answers=answers,
        taken=taken,
        reason=reason,
    )

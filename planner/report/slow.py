"""Report of `oobleck plan --slow`: the plans for slow workers side by side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName, WorkerId
from oobleck.planner.recovery.answer import Answer, Change
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Rule
from oobleck.planner.recovery.uneven.answer import by_rates, uneven
from oobleck.planner.report.shape import shape

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
    found: dict[WorkerId, float] = {}
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
        found.update((WorkerId(node, slot), rate) for slot in slots)
    return dict(sorted(found.items()))


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
        found = uneven(change).found
        taken, reason = found.rule, found.reason
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

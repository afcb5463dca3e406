"""What-if analysis for operators: the consequences if a running job loses these nodes.

The code that answers real losses makes the answer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.units import comma_separated, runs
from oobleck.planner.recovery.answer import Answer, Change, situation
from oobleck.planner.recovery.course import most_more
from oobleck.planner.recovery.policies import Answers, answer, answers
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.recovery.uneven.candidates import staying_s
from oobleck.planner.report.drawing import shape
from oobleck.planner.report.planning import Planning
from oobleck.planner.report.tables import answer_data
from oobleck.planner.search.catalogue import Catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Consequences of losing some nodes, all at once."""

    lost: tuple[NodeName, ...]
    #: Lost nodes that are in the plan.
    hit: tuple[NodeName, ...]
    step_s: float
    can_lose: int
    plan: str
    #: Layers without any holder; then the job returns to a checkpoint.
    gone_layers: tuple[int, ...]
    #: Answer; None: none is possible, and the reason says what is missing.
    taken: Answer | None
    reason: str
    #: Answer of each policy, or its refusal.
    answers: Answers

    def data(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        taken = self.taken
        return {
            "lost": list(self.lost),
            "hit": list(self.hit),
            "before": {"step_s": self.step_s, "can_lose": self.can_lose, "plan": self.plan},
            "gone_layers": [[run[0], run[-1]] for run in runs(self.gone_layers)],
            "after": None
            if taken is None
            else answer_data(taken)
            | {
                "policy": taken.policy,
                "rule": taken.found.rule,
                "then": taken.then,
                "idle": list(taken.found.idle),
            },
            "reason": self.reason,
            "policies": {policy: answer_data(each) for policy, each in self.answers.items()},
        }


def what_if(planning: Planning, lost: Collection[NodeName]) -> WhatIf:
    """Analyse the loss of the nodes; raises ValueError where one is not a node of the job, or all
    are lost."""
    unknown = set(lost) - set(planning.nodes) - set(planning.plan.nodes)
    if unknown:
        raise ValueError(f"no such node in the job's plan: {comma_separated(unknown)}")
    plan, gone = planning.plan, frozenset(lost)
    live = tuple(node for node in planning.nodes if node not in gone)
    if not live:
        raise ValueError("all nodes would be lost; leave one")
    holders = plan.layer_nodes()
    rates = {one.worker: one.rate for one in planning.rates}
    change = _change(planning, live, rates)
    each = answers(change)
    taken: Answer | None = None
    try:
        taken = answer(change, planning.policy, planning.outlook)
        reason = taken.found.reason
    except PlanInfeasible as infeasible:
        reason = str(infeasible)
    return WhatIf(
        lost=tuple(sorted(gone)),
        hit=tuple(node for node in plan.nodes if node in gone),
        step_s=staying_s(situation(replace(change, rates=rates))),
        can_lose=can_lose(plan),
        plan=shape(plan),
        gone_layers=tuple(la for la, nodes in enumerate(holders) if nodes <= gone),
        taken=taken,
        reason=reason,
        answers=each,
    )


def _change(
    planning: Planning, live: tuple[NodeName, ...], rates: Mapping[WorkerId, float]
) -> Change:
    """Build the change to the live nodes; raises PlanInfeasible."""
    terms = Terms(
        profile=planning.profile,
        sizes=range(planning.least_nodes, planning.most_nodes + 1),
        fault_tolerance=planning.fault_tolerance,
        tied=planning.tied,
        schedule=planning.base.schedule if planning.schedule_named else None,
        shadows=planning.shadows,
    )
    return terms.change(
        Catalogue(tied=planning.tied),
        plan=planning.plan,
        base=planning.base,
        live=live,
        generation=Generation(planning.plan.generation + 1),
        rates={worker: rate for worker, rate in rates.items() if worker.node in live},
        racks=dict(planning.racks),
        most_more=most_more(planning.policy),
    )

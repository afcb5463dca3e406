"""Answers to slow workers with fewer or other nodes: *stand by* and *take back*.

Both are templates, cut by the rates of the participants. Owns which nodes may be left out. Must not
know which answer is worth a change.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.core.plan import Plan
from oobleck.planner.cost.estimate import peak_bytes
from oobleck.planner.recovery.answer import Answer, Change, answer
from oobleck.planner.recovery.lost import by_templates
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Rule
from oobleck.planner.recovery.uneven.candidates import Situation, check_room, recuts

#: Nodes at least this fast never stand by: they contribute more than they cost.
_FAST_ENOUGH = 0.51
#: Most groups of nodes, of one rate each, that are tried for standing by.
_MOST_ASIDE = 3


def of_other_nodes(change: Change, now: Situation) -> Iterator[Answer]:
    """Yield plans of templates without the slowest nodes, or with some that now stand by.

    A node that stands by hands nothing over, so others must hold all its layers. The job must still
    be able to lose as many nodes as it wants, or as many as now if that is fewer.
    """
    running = change.plan
    tolerated = min(change.fault_tolerance, can_lose(running))
    slowest = _slowest_first(change, now)
    for without in (slowest[:length] for length in range(len(slowest) + 1)):
        aside = {node for nodes in without for node in nodes}
        live = tuple(node for node in change.live if node not in aside)
        left = set(running.nodes) - set(live)
        if set(live) == set(running.nodes) or not _can_do_without(running, left):
            continue
        with suppress(PlanInfeasible):
            made = _cut_by_rates(by_templates(replace(change, live=live)), change, now)
            check_room(peak_bytes(made.found.plan, change.profile), now)
            if can_lose(made.found.plan) < tolerated:
                continue
            idle = tuple(sorted({*made.found.idle, *aside}))
            rule: Rule = "stand by" if left else "take back"
            yield replace(made, policy="uneven", found=replace(made.found, rule=rule, idle=idle))


def _cut_by_rates(made: Answer, change: Change, now: Situation) -> Answer:
    """Return the answer with fewer layers for slow workers, where that makes steps shorter."""
    plan = made.found.plan
    for cut in recuts(plan, now) if plan.rates else ():
        if cut.step_s < made.step_s:
            return answer("uneven", replace(made.found, plan=cut.plan), cut.step_s, change)
    return made


def _slowest_first(change: Change, now: Situation) -> Sequence[Sequence[NodeName]]:
    """Return nodes with very slow workers, grouped by rate, slowest first."""
    slowest: dict[NodeName, float] = {}
    for worker, rate in now.rates.items():
        slowest[worker.node] = min(rate, slowest.get(worker.node, rate))
    by_rate: dict[float, list[NodeName]] = {}
    for node in change.live:
        if slowest.get(node, 1.0) < _FAST_ENOUGH:
            by_rate.setdefault(slowest[node], []).append(node)
    return [by_rate[rate] for rate in sorted(by_rate)][:_MOST_ASIDE]


def _can_do_without(plan: Plan, nodes: Set[NodeName]) -> bool:
    """Return whether the other nodes hold all layers."""
    return all(holders - nodes for holders in plan.layer_nodes())

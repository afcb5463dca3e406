"""The answer to the current rates of workers: the best of all candidates, if it is worth a change.

Must not know how a candidate gets its routes.
"""

from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.core.plan import Plan
from oobleck.core.units import comma_separated, format_bytes
from oobleck.planner.cost.estimate import peak_bytes
from oobleck.planner.recovery.answer import (
    Answer,
    Change,
    Situation,
    answer,
    idle,
    situation,
    splitting_weight,
)
from oobleck.planner.recovery.chooser import LEAST_GAIN, weighed_s
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Reconfiguration, Rule
from oobleck.planner.recovery.uneven.candidates import candidates, check_room, recuts, staying_s
from oobleck.planner.recovery.worth import (
    by_templates,
    can_lose_behind,
    shadows_behind,
    worth_choosing,
)

# ---- Answers to slow workers with fewer or other nodes: *stand by* and *take back*.
#
# Both are templates, cut by the rates of the participants. Owns which nodes may be left out. Must
# not know which answer is worth a change.


#: Nodes at least this fast never stand by: they contribute more than they cost.
_FAST_ENOUGH = 0.51
#: Most groups of nodes, of one rate each, that are tried for standing by.
_MOST_ASIDE = 3


def of_other_nodes(change: Change, now: Situation) -> Iterator[Answer]:
    """Yield plans of templates without the slowest nodes, or with some that now stand by.

    A node that stands by sends no state, so others must hold all its layers. The job must still be
    able to lose as many nodes as it wants, or as many as now if that is fewer.
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
            # Those aside train until the change.
            others = replace(change, live=live, leaving=change.leaving | aside)
            made = _cut_by_rates(by_templates(others), change, now)
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


def uneven(change: Change) -> Sequence[Answer]:
    """Return plans for the current rates that are worth a change. No node is lost; live nodes
    outside the running plan stand by.

    Raises PlanInfeasible, with the reason, where staying is better.
    """
    now = situation(change)
    before_s = staying_s(now)
    offers = list(_by_rates(change, now))
    if not offers:
        raise PlanInfeasible("no other plan is better for the rates of the workers")
    try:
        worth: Sequence[Answer] = worth_choosing(offers, change.plan, before_s)
    except PlanInfeasible:
        undone = _undone(offers, change, before_s)
        if undone is None:
            raise
        worth = [replace(undone, undoes=True)]
    return [_explained(offer, change, before_s) for offer in worth]


def _explained(offer: Answer, change: Change, before_s: float) -> Answer:
    """Return the offer with its reason for operators, and its follow-up."""
    reason = (
        f"{_slow_ones(change)}: {offer.found.rule}: a step takes {offer.step_s:.4g} s in place of "
        f"{before_s:.4g} s, and {format_bytes(offer.moved_bytes)} move"
    )
    # Another cut may leave a layer on fewer nodes.
    then = offer.then or shadows_behind(offer.found.plan, change)
    return replace(offer, found=replace(offer.found, reason=reason), then=then)


def _undone(offers: Sequence[Answer], change: Change, before_s: float) -> Answer | None:
    """Return the answer that undoes the changes for slow workers, once no live worker is slow.
    Return None while one is, or where the running plan's step is still shorter."""
    if any(worker.node in change.live for worker, rate in change.rates.items() if rate != 1):
        return None
    for offer in offers:
        if offer.found.rule == "as planned" and not offer.moved_bytes:
            before_s *= splitting_weight(change.plan)
            if weighed_s(offer) <= before_s * (1 + LEAST_GAIN):
                return offer
    return None


def by_rates(change: Change) -> tuple[float, Sequence[Answer]]:
    """Return the step time of the running plan at the current rates, and all possible answers."""
    now = situation(change)
    return staying_s(now), list(_by_rates(change, now))


def _by_rates(change: Change, now: Situation) -> Iterator[Answer]:
    running = change.plan
    tolerated = min(change.fault_tolerance, can_lose(running))
    for each in candidates(now):
        plan = each.plan.having(generation=change.generation)
        if (plan.holds, plan.routes, plan.schedule) == (
            running.holds,
            running.routes,
            running.schedule,
        ):
            continue
        if each.rule == "recut" and can_lose_behind(plan, change) < tolerated:
            continue  # its shadows do not fit the memory
        made = Reconfiguration(plan=plan, rule=each.rule, reason="", idle=idle(change, plan))
        yield answer("uneven", made, each.step_s, change)
    yield from of_other_nodes(change, now)


def _slow_ones(change: Change) -> str:
    slow = [
        f"{worker} at {rate:.2g}"
        for worker, rate in sorted(change.rates.items())
        if rate != 1 and worker.node in change.live
    ]
    return (
        f"{comma_separated(slow)} of the profiled speed" if slow else "all workers are well again"
    )

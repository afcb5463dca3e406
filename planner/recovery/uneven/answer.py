"""The answer to the current rates of workers: the best of all candidates, if it is worth a change.

Must not know how a candidate gets its routes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.units import comma_separated, format_bytes
from oobleck.planner.recovery.answer import Answer, Change, answer, idle, situation
from oobleck.planner.recovery.reconfigure import Reconfiguration, can_lose
from oobleck.planner.recovery.shadowed import can_lose_behind, shadows_behind
from oobleck.planner.recovery.uneven.candidates import Situation, candidates, staying_s
from oobleck.planner.recovery.uneven.others import of_other_nodes
from oobleck.planner.recovery.worth import LEAST_GAIN, splitting_weight, worth_a_change


def uneven(change: Change) -> Answer:
    """Answer with the best plan for the current rates. No node is lost; live nodes outside the
    running plan stand by.

    Raises PlanInfeasible, with the reason, where staying is better.
    """
    now = situation(change)
    before_s = staying_s(now)
    offers = list(_by_rates(change, now))
    if not offers:
        raise PlanInfeasible("no other plan is better for the rates of the workers")
    try:
        best = worth_a_change(offers, change.plan, before_s)
    except PlanInfeasible:
        undone = _undone(offers, change, before_s)
        if undone is None:
            raise
        best = undone
    reason = (
        f"{_slow_ones(change)}: {best.found.rule}: a step takes {best.step_s:.4g} s in place of "
        f"{before_s:.4g} s, and {format_bytes(best.moved_bytes)} move"
    )
    # Another cut may leave a layer on fewer nodes.
    then = best.then or shadows_behind(best.found.plan, change)
    return replace(best, found=replace(best.found, reason=reason), then=then)


def _undone(offers: Sequence[Answer], change: Change, before_s: float) -> Answer | None:
    """Return the answer that undoes the changes for slow workers, once no live worker is slow.
    Return None while one is, or where the running plan's step is still shorter."""
    if any(worker.node in change.live for worker, rate in change.rates.items() if rate != 1):
        return None
    for offer in offers:
        if offer.found.rule == "as planned" and not offer.moved_bytes:
            before_s *= splitting_weight(change.plan)
            if offer.step_s * splitting_weight(offer.found.plan) <= before_s * (1 + LEAST_GAIN):
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
        plan = replace(each.plan, generation=change.generation)
        if (plan.holds, plan.routes, plan.schedule) == (
            running.holds,
            running.routes,
            running.schedule,
        ):
            continue
        if each.rule == "recut" and can_lose_behind(plan, change) < tolerated:
            continue  # no memory for its shadows
        found = Reconfiguration(plan=plan, rule=each.rule, reason="", idle=idle(change, plan))
        yield answer("uneven", found, each.step_s, change)
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

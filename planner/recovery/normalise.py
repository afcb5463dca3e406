"""Normalising after a re-route: one stage takes over the layers of a hole in place of its own.

Where several holes are at the same layers, their few holders compute most of the step, and the
others wait. If one stage is copied to a worker of other layers, the holes are at different ones,
and more workers share each (*normalising*: Gandhi et al., ReCycle, SOSP 2024). Owns the choice of
the move. Must not know how state moves, nor which moves exist.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Route
from oobleck.core.units import comma_separated
from oobleck.planner.recovery.answer import Answer, Change, answer, idle, situation
from oobleck.planner.recovery.chooser import LEAST_GAIN
from oobleck.planner.recovery.moves import Moves, Ticks, most_load
from oobleck.planner.recovery.rules import Next, Reconfiguration
from oobleck.planner.recovery.uneven.candidates import hop_ticks, scheduled, staying_s
from oobleck.planner.recovery.worth import shadows_behind, worth_choosing

#: Number of moves, by least load, that get a schedule.
MOST_SCHEDULED = 3


def normalised(change: Change) -> Sequence[Answer]:
    """Return answers with the running plan and a move that shortens its step. Raises PlanInfeasible
    where none is worth it.
    """
    now = situation(change)
    before_s = staying_s(now)
    offers: list[Answer] = []
    moves = Moves(change.base, change.plan, _ticks(change))
    for move in moves.by_load(MOST_SCHEDULED)[:MOST_SCHEDULED]:
        plan = _moved(change, *moves.behind(move.taken))
        with suppress(PlanInfeasible):
            routed, step_s = scheduled(plan, now)
            offers.append(_answer(change, routed, step_s, move.taken))
    if not offers:
        raise PlanInfeasible("no worker can take over a lost worker's layers in place of its own")
    return [
        replace(offer, then=_follow_up(change, offer.found.plan))
        for offer in worth_choosing(offers, change.plan, before_s)
    ]


def _follow_up(change: Change, plan: Plan) -> Next | None:
    return "normalise" if promising(change, plan) else shadows_behind(plan, change)


def promising(change: Change, plan: Plan) -> bool:
    """Return whether a move after `plan` may relieve the busiest worker enough to be worth it.

    Only bounds on the work are computed, no routes or schedules. True is a guess; where it is
    False, only another order of work can shorten the step.
    """
    ticks = _ticks(change)
    most = (1 - LEAST_GAIN) * most_load(plan.routes, ticks)
    return Moves(change.base, plan, ticks).may_leave(most)


def _ticks(change: Change) -> Ticks:
    return hop_ticks(change.profile, change.plan.with_rates(change.rates))


def _moved(change: Change, holds: tuple[Hold, ...], routes: tuple[Route, ...]) -> Plan:
    plan = replace(
        change.plan,
        generation=change.generation,
        holds=holds,
        routes=routes,
        listing=None,
        rates=(),
    )
    return plan.with_rates(change.rates)


def _answer(change: Change, plan: Plan, step_s: float, taken: Hold) -> Answer:
    names = comma_separated(map(str, taken.workers))
    verb = "takes" if len(taken.workers) == 1 else "take"
    made = Reconfiguration(
        plan=plan,
        rule="normalise",
        reason=f"{names} {verb} over layers {taken.first_layer}-{taken.last_layer} in place of "
        "others, so that the busiest worker has less to do",
        idle=idle(change, plan),
    )
    return answer("normalise", made, step_s, change)

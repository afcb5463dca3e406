"""Behind a re-routed plan: somebody takes over the layers of a hole, and gives up its own.

Where several holes are at the same layers, the few that hold them compute most of the step, and the
others wait. With one stage copied to a worker of other layers the holes are at different ones, and
more workers share each (*normalising*: Gandhi et al., ReCycle, SOSP 2024). Owns who takes which
layers. Must not know how state comes there.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hold, Hop, Route
from oobleck.planner.recovery.answer import Answer, Change, answer, idle, situation
from oobleck.planner.recovery.reconfigure import Reconfiguration, can_lose
from oobleck.planner.recovery.reroute import add_load, held_layers, routes_around
from oobleck.planner.recovery.uneven.candidates import hop_ticks, scheduled, staying_s
from oobleck.planner.recovery.worth import LEAST_GAIN, worth_a_change
from oobleck.planner.units import comma_separated

_Ticks = Callable[[Hop], int]
#: Of the moves with the least load that leave no layer to fewer nodes, how many get a schedule.
MOST_SCHEDULED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Workers hold these layers in place of all that they held."""

    taken: Hold
    holds: tuple[Hold, ...]
    routes: tuple[Route, ...]
    #: What the worker with most to do has.
    load: int


def normalised(change: Change) -> Answer:
    """The running plan with the best move. Raises PlanInfeasible where none is worth it."""
    now = situation(change)
    before_s = staying_s(now)
    offers: list[Answer] = []
    plans = (
        (move, _moved(change, move)) for move in by_load(change.base, change.plan, _ticks(change))
    )
    safe = ((move, plan) for move, plan in plans if can_lose(plan) >= can_lose(change.plan))
    for move, plan in islice(safe, MOST_SCHEDULED):
        with suppress(PlanInfeasible):
            routed, step_s = scheduled(plan, now)
            offers.append(_answer(change, routed, step_s, move.taken))
    if not offers:
        raise PlanInfeasible("nobody can take over the layers of a lost worker for its own")
    best = worth_a_change(offers, before_s)
    return replace(best, then="normalise" if promising(change, best.found.plan) else None)


def promising(change: Change, plan: Plan) -> bool:
    """Whether behind `plan` some move leaves less to the worker with most to do. Schedules, which
    take longer, can tell otherwise."""
    ticks = _ticks(change)
    found = by_load(change.base, plan, ticks)
    return bool(found) and found[0].load <= (1 - LEAST_GAIN) * most_load(plan.routes, ticks)


def by_load(base: Plan, running: Plan, ticks: _Ticks) -> list[Move]:
    """All moves, but for one of those that are alike, by what they leave to the worker with most to
    do. `base` is the plan of templates that was re-routed."""
    held = held_layers(running.holds)
    lost = [hop for route in base.routes for hop in route.hops if not _holds(held, hop)]
    # In the order of the layers.
    holes = sorted({(hop.first_layer, hop.last_layer) for hop in lost})
    found = [
        move
        for workers in _different(base, running, set(lost), ticks)
        for first_layer, last_layer in holes
        if not held[workers].issuperset(range(first_layer, last_layer + 1))
        for move in _move(
            base,
            running,
            Hold(first_layer=first_layer, last_layer=last_layer, workers=workers),
            ticks,
        )
    ]
    return sorted(found, key=lambda move: move.load)


def most_load(routes: tuple[Route, ...], ticks: _Ticks) -> int:
    load: Counter[WorkerId] = Counter()
    for route in routes:
        for hop in route.hops:
            add_load(load, hop, route.microbatches * ticks(hop))
    return max(load.values())


def _different(
    base: Plan, running: Plan, lost: set[Hop], ticks: _Ticks
) -> Iterator[tuple[WorkerId, ...]]:
    """Of workers that hold layers together, one each of those that are alike: they have the same
    place in pipelines with the same holes."""
    seen = set()
    places = {
        hop.workers: (number, route)
        for route in base.routes
        for number, hop in enumerate(route.hops)
    }
    held = held_layers(running.holds)
    for workers, layers in held.items():
        number, route = places.get(workers, (0, None))
        hops = () if route is None else route.hops
        alike = (
            number,
            tuple(sorted(layers)),
            len(workers),
            route.microbatches if route is not None else 0,
            tuple((hop.layers, hop in lost, 0 if hop in lost else ticks(hop)) for hop in hops),
        )
        if alike not in seen:
            seen.add(alike)
            yield workers


def _move(base: Plan, running: Plan, taken: Hold, ticks: _Ticks) -> Iterator[Move]:
    """One, if all layers have holders then that can follow each other."""
    others = (hold for hold in running.holds if set(hold.workers).isdisjoint(taken.workers))
    holds = (*others, taken)
    held = held_layers(holds)
    if len(frozenset().union(*held.values())) < running.layer_count:
        return
    lost = {
        worker
        for route in base.routes
        for hop in route.hops
        if not _holds(held, hop)
        for worker in hop.workers
    }
    with suppress(PlanInfeasible):
        routes = routes_around(base.routes, held, lost, ticks)
        yield Move(taken=taken, holds=holds, routes=routes, load=most_load(routes, ticks))


def _holds(held: dict[tuple[WorkerId, ...], set[int]], hop: Hop) -> bool:
    return held.get(hop.workers, set()).issuperset(hop.layers)


def _ticks(change: Change) -> _Ticks:
    return hop_ticks(change.profile, change.plan.with_rates(change.rates))


def _moved(change: Change, move: Move) -> Plan:
    plan = replace(
        change.plan,
        generation=change.generation,
        holds=move.holds,
        routes=move.routes,
        listing=None,
        rates=(),
    )
    return plan.with_rates(change.rates)


def _answer(change: Change, plan: Plan, step_s: float, taken: Hold) -> Answer:
    names = comma_separated(map(str, taken.workers))
    verb = "takes" if len(taken.workers) == 1 else "take"
    found = Reconfiguration(
        plan=plan,
        rule="normalise",
        reason=f"{names} {verb} over layers {taken.first_layer}-{taken.last_layer} in place of "
        "others, so that the busiest worker has less to do",
        idle=idle(change, plan),
    )
    return answer("normalise", found, step_s, change)

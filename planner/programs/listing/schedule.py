"""List scheduling: from the routes of a plan to the order of compute on each worker.

Several rules rank the micro-batches, a pass makes a schedule of each ranking, and the one of least
makespan is kept. The rest of a budget is spent on other ranks. It is counted in visits and not in
time, so that a plan has the same schedule on every machine. The times of a long schedule are
extrapolated from two short ones. Owns rules, search and the result. Must not know how a pass works.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from msgspec import structs

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.core.plan import Plan
from oobleck.core.routes import Hop, HopTicks
from oobleck.planner.programs.listing.passes import Pass, Visits, run_pass, visits_of

# ---- Lower bound of a list schedule's time, at which a search can stop.


def loads(visits: Visits) -> list[int]:
    """Return the ticks of each worker's whole work."""
    load = [0] * len(visits.workers)
    for visit, group in enumerate(visits.group):
        ticks = visits.forward[visit] + visits.backward[visit] + visits.weight[visit]
        for worker in visits.members[group]:
            load[worker] += ticks
    return load


@dataclass(slots=True)
class _Least:
    """Least times and bytes of one worker's work."""

    #: Earliest begin of a forward, and of a backward.
    forward: int
    backward: int
    #: Least time from its last work to the end of the step.
    tail: int
    #: Least bytes that a micro-batch keeps, and most ticks that a forward takes.
    kept: int
    most_ticks: int = 0


def least_makespan(visits: Visits) -> int:
    """Return a lower bound of the makespan."""
    longest, ends = _least_ends(visits, loads(visits))
    return max([longest, *ends])


def _least_ends(visits: Visits, load: Sequence[int]) -> tuple[int, list[int]]:
    """Return a single micro-batch's time, and by worker a lower bound of the makespan from its
    `load`, the ticks of its whole work.

    A worker does all its work. Before that it waits for its first forward. Until its first backward
    can begin it has only forwards, as many as fit. After its last work, backwards may remain on the
    hops before.
    """
    never = sum(visits.forward) + sum(visits.backward) + 2 * sum(visits.message)
    least = [_Least(forward=never, backward=never, tail=never, kept=room) for room in visits.room]
    longest = 0
    for microbatch, path in enumerate(visits.path):
        if visits.place[microbatch] > 0:
            continue  # equal to the first micro-batch of its route
        time = 0
        begins = []
        for visit in path:
            begins.append(time)
            time += visits.forward[visit] + (0 if visits.last[visit] else visits.message[visit])
        backwards = {}
        for visit in reversed(path):
            time += 0 if visits.last[visit] else visits.message[visit]
            backwards[visit] = time
            time += visits.backward[visit]
        longest = max(longest, time)
        for visit, begin in zip(path, begins, strict=True):
            left = time - backwards[visit] - visits.backward[visit]
            for worker in visits.members[visits.group[visit]]:
                own = least[worker]
                own.forward = min(own.forward, begin)
                own.backward = min(own.backward, backwards[visit])
                own.tail = min(own.tail, 0 if visits.splits[visit] else left)
                own.kept = min(own.kept, visits.kept[visit])
                own.most_ticks = max(own.most_ticks, visits.forward[visit])
    ends = []
    for room, own, ticks in zip(visits.room, least, load, strict=True):
        begin = own.forward
        if own.kept > 0:
            # Latest begin of work that continues without a pause from there.
            begin = max(begin, own.backward - room // own.kept * own.most_ticks)
        ends.append(begin + ticks + own.tail)
    return longest, ends


#: Visits that all passes together may schedule, and the most passes: about 30 ms. One pass is
#: always made. Three times as many shorten a step by 0.05 % on average, and by 1 % at most.
BUDGET_VISITS = 3_000
_MOST_PASSES = 256
#: Cost of a pass in which each forward asks whether it is safe, relative to one without.
_UNORDERED_COST = 4
#: Parts of a backward, by whether it is split.
_BACKWARDS: Mapping[bool, tuple[type[Compute], ...]] = {
    False: (Backward,),
    True: (BackwardInput, BackwardWeight),
}
#: Order of the micro-batches, and how many more than under 1F1B are in flight.
_Try = tuple[list[int], int | None]
_SPARES = (None, 0, 1, 2)
#: Resolution at which the places of routes of different lengths are compared.
_FINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule:
    """Order and times of each worker's compute, in ticks from the begin of the step; without
    workers that compute nothing."""

    orders: Mapping[WorkerId, tuple[Compute, ...]]
    #: By worker, in its order.
    begins: Mapping[WorkerId, tuple[int, ...]]
    ends: Mapping[WorkerId, tuple[int, ...]]
    makespan: int
    #: Most bytes of micro-batches that each worker keeps at a time.
    peak_bytes: Mapping[WorkerId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Times and bytes of a list schedule, without its orders: exact, or extrapolated for one of
    many visits."""

    #: End of each worker's last compute.
    ends: Mapping[WorkerId, int]
    #: Most bytes of micro-batches that each worker keeps at a time, or an upper bound.
    peak_bytes: Mapping[WorkerId, int]


def listed_routes(plan: Plan) -> tuple[int, ...]:
    """Return the routes (positions in the plan) that need list scheduling. The others keep their
    closed form."""
    return plan.meeting_routes


def planned(plan: Plan) -> ListSchedule | None:
    """Return the schedule of the plan's listed routes by its listing, the same on every machine;
    None: all routes have closed forms. Raises ValueError where the plan lacks a listing, and
    PlanInfeasible.

    Cached: a plan is compiled, and compiled again for the rest of a step.
    """
    asked = _asked(plan)
    return None if asked is None else _planned(*asked)


def foreseen(plan: Plan) -> Foreseen | None:
    """Return the times of `planned`, at a cost that does not grow with the micro-batches. Raises
    likewise."""
    asked = _asked(plan)
    return None if asked is None else _foreseen(*asked)


def _asked(plan: Plan) -> tuple[Plan, tuple[int, ...]] | None:
    """Return the plan reduced to what its list schedule depends on (a cache key), and its listed
    routes."""
    routes = listed_routes(plan)
    if not routes:
        return None
    if plan.listing is None:
        raise ValueError("workers compute in several hops, and the plan lacks their costs")
    # The generation and the order in closed forms do not matter, and the ticks include the rates.
    return plan.having(generation=Generation(0), schedule="1f1b", rates=()), routes


@lru_cache(maxsize=4)
def _planned(plan: Plan, routes: tuple[int, ...]) -> ListSchedule:
    visits = _visits(plan, routes)
    return _result(visits, _best(visits, _passes(visits, BUDGET_VISITS)))


def _visits(plan: Plan, routes: tuple[int, ...]) -> Visits:
    assert plan.listing is not None, "it was asked for"
    ticks = {
        hop: taken
        for number in routes
        for hop, taken in zip(plan.routes[number].hops, plan.listing.hops[number], strict=True)
    }
    room = dict(zip(plan.workers, plan.listing.room, strict=True))
    return visits_of(plan, ticks.__getitem__, room, split=plan.listing.split, routes=routes)


# ---- Long schedules: what many micro-batches take, from fewer of each route.
#
# The time beyond the busiest worker's work is spent while the pipelines fill and drain, and by
# stalls that recur. Two short schedules, both long enough to fill all pipelines, tell these apart.
# Of pipelines that are cut alike and help others, the busiest represents all.


#: Micro-batches of the longest route in the shorter schedule, beyond its hops, and the fewest.
_BEYOND_HOPS = 8
_FEWEST = 16
#: Pipelines whose least time is below this share of the largest one are not scheduled.
_BUSY = 0.95


@lru_cache(maxsize=4)
def _foreseen(plan: Plan, routes: tuple[int, ...]) -> Foreseen:
    assert plan.listing is not None, "it was asked for"
    # Without weight gradients that fill gaps, stalls are too irregular to extrapolate.
    if 2 * _count(plan, routes) <= BUDGET_VISITS or not plan.listing.split:
        return _exactly(plan, routes)
    least, load, most_bytes = _least_by_worker(plan, routes)
    kept = _representing(plan, routes, least)
    longest = max(plan.routes[number].microbatches for number in kept)
    fewer = _fewer(max(len(plan.routes[number].hops) for number in kept))
    if len(kept) == len(routes) and longest <= 2 * 2 * fewer:
        return _exactly(plan, routes)
    some = _of_routes(plan, kept)
    late = _end(shortened(some, 2 * fewer))
    busiest = max(load[worker] for worker in late.ends)
    makespan = late.stalled + busiest
    if busiest > late.busiest:
        early = _end(shortened(some, fewer))
        stalled = (late.stalled - early.stalled) / max(1, late.busiest - early.busiest)
        # Where the time beyond the work shrinks, the shorter one has not filled all pipelines.
        makespan += round(max(0.0, stalled) * (busiest - late.busiest))
    beyond = makespan - max(least[worker] for worker in late.ends)
    ends = {worker: min(makespan, own + beyond) for worker, own in least.items()}
    for worker, end in late.ends.items():
        ends[worker] = max(load[worker], makespan - late.makespan + end)
    # Deferred weight gradients accumulate in the room that there is.
    room = dict(zip(plan.workers, plan.listing.room, strict=True))
    return Foreseen(
        ends=ends,
        peak_bytes={worker: min(room[worker], most) for worker, most in most_bytes.items()},
    )


def _fewer(hops: int) -> int:
    """Return the micro-batches of the longest route in the shorter schedule."""
    return max(_FEWEST, _BEYOND_HOPS + hops)


def _exactly(plan: Plan, routes: tuple[int, ...]) -> Foreseen:
    visits = _visits(plan, routes)
    best = _best(visits, _passes(visits, BUDGET_VISITS))
    return Foreseen(
        ends=_ends(visits, best),
        peak_bytes=dict(zip(visits.workers, best.peak_bytes, strict=True)),
    )


def _least_by_worker(
    plan: Plan, routes: tuple[int, ...]
) -> tuple[dict[WorkerId, int], Counter[WorkerId], Counter[WorkerId]]:
    """Return for each worker of these routes a lower bound of the time, the ticks of its whole
    work, and the bytes of all its micro-batches together."""
    assert plan.listing is not None, "it was asked for"
    load, kept = Counter[WorkerId](), Counter[WorkerId]()
    for number in routes:
        route = plan.routes[number]
        for hop, taken in zip(route.hops, plan.listing.hops[number], strict=True):
            each = taken.forward + taken.backward_input + taken.backward_weight
            for worker in hop.workers:
                load[worker] += route.microbatches * each
                kept[worker] += route.microbatches * taken.kept_bytes
    one = _visits(shortened(plan, 1), routes)
    _, ends = _least_ends(one, [load[worker] for worker in one.workers])
    return dict(zip(one.workers, ends, strict=True)), load, kept


def _representing(plan: Plan, routes: tuple[int, ...], least: Mapping[WorkerId, int]) -> list[int]:
    """Return those of the routes that decide how long a step takes.

    A pipeline may be left out whose own micro-batches are the most on each of its workers. It is,
    if it is far less busy than others, or if another one of the same hops is busier.
    """
    assert plan.listing is not None, "it was asked for"
    most, second = Counter[WorkerId](), Counter[WorkerId]()
    for number in routes:
        count = plan.routes[number].microbatches
        for worker in {worker for hop in plan.routes[number].hops for worker in hop.workers}:
            second[worker] = max(second[worker], min(count, most[worker]))
            most[worker] = max(most[worker], count)
    enough = _BUSY * max(least.values())
    kept, best = list[int](), dict[object, tuple[int, int]]()
    for number in routes:
        route = plan.routes[number]
        workers = [worker for hop in route.hops for worker in hop.workers]
        if any(second[worker] >= route.microbatches for worker in workers):
            kept.append(number)
            continue
        busy = max(least[worker] for worker in workers)
        kind = tuple(hop.layers for hop in route.hops), plan.listing.hops[number]
        if busy >= enough and busy > best.get(kind, (0, 0))[0]:
            best[kind] = busy, number
    return sorted([*kept, *(number for _, number in best.values())])


def _of_routes(plan: Plan, routes: Iterable[int]) -> Plan:
    """Return the plan with these routes alone, and the holds of their workers."""
    assert plan.listing is not None, "it was asked for"
    chosen = [plan.routes[number] for number in routes]
    passed = {worker for route in chosen for hop in route.hops for worker in hop.workers}
    holds = tuple(hold for hold in plan.holds if not passed.isdisjoint(hold.workers))
    some = {worker for hold in holds for worker in hold.workers}
    room = tuple(
        own for worker, own in zip(plan.workers, plan.listing.room, strict=True) if worker in some
    )
    listing = structs.replace(
        plan.listing, hops=tuple(plan.listing.hops[n] for n in routes), room=room
    )
    return replace(plan, holds=holds, routes=tuple(chosen), listing=listing)


class _End(NamedTuple):
    """End of a short schedule."""

    ends: Mapping[WorkerId, int]
    makespan: int
    #: Ticks of the busiest worker's work, and those of the step beyond them.
    busiest: int
    stalled: int


def _end(plan: Plan) -> _End:
    """Schedule all routes of the plan by the first rule."""
    visits = _visits(plan, tuple(range(len(plan.routes))))
    best = _best(visits, 1)
    busiest = max(loads(visits))
    return _End(
        ends=_ends(visits, best),
        makespan=best.makespan,
        busiest=busiest,
        stalled=best.makespan - busiest,
    )


def _ends(visits: Visits, best: Pass) -> dict[WorkerId, int]:
    """Return the end of each worker's last compute."""
    count, ticks = len(visits.owner), visits.forward + visits.backward + visits.weight
    ends = [0] * len(visits.workers)
    for begin, code in best.begun:
        for worker in visits.members[visits.group[code % count]]:
            ends[worker] = begin + ticks[code]
    return dict(zip(visits.workers, ends, strict=True))


def forget() -> None:
    """Forget all schedules."""
    _planned.cache_clear()
    _foreseen.cache_clear()


# ---- Plans of fewer micro-batches.


def shortened(plan: Plan, most: int) -> Plan:
    """Return the plan with at most `most` micro-batches on each route, in the same proportions."""
    longest = max(route.microbatches for route in plan.routes)
    if longest <= most:
        return plan
    routes = tuple(
        structs.replace(route, microbatches=max(1, round(route.microbatches * most / longest)))
        for route in plan.routes
    )
    return replace(plan, routes=routes)


#: Fewest micro-batches of the longest route in an example.
_LEAST_EXAMPLE = 2


def example(plan: Plan, visits: int) -> tuple[Plan, ListSchedule]:
    """Return the plan with about so many visits on its listed routes, if it has more, and a list
    schedule by the first rule. All hops are in it. `plan` must have a listing."""
    asked = _asked(plan)
    assert asked is not None, "it has a listing"
    whole, routes = asked
    longest = max(route.microbatches for route in whole.routes)
    most = max(_LEAST_EXAMPLE, longest * visits // max(1, _count(whole, routes)))
    few = shortened(whole, most)
    columns = _visits(few, routes)
    return few, _result(columns, _best(columns, 1))


def _count(plan: Plan, routes: Iterable[int]) -> int:
    return sum(plan.routes[n].microbatches * len(plan.routes[n].hops) for n in routes)


def list_schedule(
    plan: Plan,
    ticks: Callable[[Hop], HopTicks],
    room: Mapping[WorkerId, int],
    *,
    split: bool,
    routes: tuple[int, ...] | None = None,
    budget_visits: int = BUDGET_VISITS,
) -> ListSchedule:
    """Schedule `routes` (positions in the plan; all if None), whose workers no other route may
    have.

    `room` is the bytes that each worker can keep of micro-batches. `split`: all hops but the first
    of a route have their backward in two. Raises PlanInfeasible where a worker has no room for a
    single micro-batch.
    """
    positions = tuple(range(len(plan.routes))) if routes is None else routes
    visits = visits_of(plan, ticks, room, split=split, routes=positions)
    return _result(visits, _best(visits, _passes(visits, budget_visits)))


def _passes(visits: Visits, budget_visits: int) -> int:
    cost = len(visits.owner) * (1 if visits.ordered else _UNORDERED_COST)
    return min(max(1, budget_visits // max(1, cost)), _MOST_PASSES)


# ---- the best of several passes


def _best(visits: Visits, passes: int) -> Pass:
    """Return the best of so many passes, the first among equals. Passes by rules are made first,
    then passes with random changes. The search ends early at a makespan equal to the lower
    bound."""
    least = least_makespan(visits)
    best: Pass | None = None
    start: _Try = [], None
    for tried in islice(_rules(visits), passes):
        passes -= 1
        made = _run(visits, tried)
        if best is None or made.makespan < best.makespan:
            best, start = made, tried
        if best.makespan == least:
            return best
    assert best is not None, "there is one pass at least"
    draws = _draws()
    for _ in range(passes):
        tried = _changed(visits, *start, draws)
        made = _run(visits, tried)
        # Start the next change from an equally good pass too, so that the search leaves plateaus.
        if made.makespan <= best.makespan:
            start = tried
        if made.makespan < best.makespan:
            best = made
        if best.makespan == least:
            break
    return best


def _run(visits: Visits, tried: _Try) -> Pass:
    order, spare = tried
    ranks = [0] * len(order)
    for rank, microbatch in enumerate(order):
        ranks[microbatch] = rank
    return run_pass(visits, ranks, spare)


def _rules(visits: Visits) -> Iterator[_Try]:
    """Yield the tries by rules: the most successful rule first, then those that differ most from
    it."""
    route, place, mates = visits.route, visits.place, visits.mates
    busiest = _busiest(visits)
    everyone = range(len(visits.number))
    together = sorted(everyone, key=lambda m: (place[m] * _FINE // mates[m], route[m]))
    in_step = sorted(everyone, key=lambda m: (place[m], route[m]))
    busiest_first = sorted(everyone, key=lambda m: (-busiest[m], place[m], route[m]))
    yield together, None
    yield in_step, 1
    yield together, 2
    yield busiest_first, 1
    yield in_step, None
    yield sorted(everyone, key=lambda m: (busiest[m], place[m], route[m])), None
    yield busiest_first, None
    yield in_step, 0
    yield sorted(everyone, key=lambda m: (place[m], -route[m])), None


def _changed(visits: Visits, order: list[int], spare: int | None, draws: Iterator[int]) -> _Try:
    """Return a small change: six times in ten one micro-batch moves some places, three times all of
    a route, and once the number in flight changes."""
    choice, drawn = next(draws) % 10, next(draws) % 8
    microbatch = order[next(draws) % len(order)]
    if choice == 0:
        return order, _SPARES[drawn % len(_SPARES)]
    by = (-4, -3, -2, -1, 1, 2, 3, 4)[drawn]
    if choice > 3:
        rest = [other for other in order if other != microbatch]
        end = min(max(order.index(microbatch) + by, 0), len(rest))
        return [*rest[:end], microbatch, *rest[end:]], spare
    route = visits.route[microbatch]
    by *= len(set(visits.route))
    moved = {
        other: place + by if visits.route[other] == route else place
        for place, other in enumerate(order)
    }
    # Sorting is stable: equal ones keep their order.
    return sorted(order, key=moved.__getitem__), spare


def _draws() -> Iterator[int]:
    """Yield pseudo-random numbers, the same on every machine."""
    state = 1
    while True:
        # Knuth's MMIX; its high bits are the good ones.
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def _busiest(visits: Visits) -> list[int]:
    """Return for each micro-batch the whole ticks of the busiest worker that it passes."""
    load = loads(visits)
    return [
        max(load[worker] for visit in path for worker in visits.members[visits.group[visit]])
        for path in visits.path
    ]


# ---- the result


def _result(visits: Visits, best: Pass) -> ListSchedule:
    orders: list[list[Compute]] = [[] for _ in visits.workers]
    begins: list[list[int]] = [[] for _ in visits.workers]
    ends: list[list[int]] = [[] for _ in visits.workers]
    count = len(visits.owner)
    ticks = visits.forward + visits.backward + visits.weight
    for begin, code in best.begun:
        kind, visit = divmod(code, count)
        what: type[Compute] = Forward
        if kind:
            what = _BACKWARDS[visits.splits[visit]][kind - 1]
        hop = visits.hops[visits.hop[visit]]
        compute = what(
            microbatch=visits.number[visits.owner[visit]],
            first_layer=hop.first_layer,
            last_layer=hop.last_layer,
        )
        for worker in visits.members[visits.group[visit]]:
            orders[worker].append(compute)
            begins[worker].append(begin)
            ends[worker].append(begin + ticks[code])
    return ListSchedule(
        orders=dict(zip(visits.workers, map(tuple, orders), strict=True)),
        begins=dict(zip(visits.workers, map(tuple, begins), strict=True)),
        ends=dict(zip(visits.workers, map(tuple, ends), strict=True)),
        makespan=best.makespan,
        peak_bytes=dict(zip(visits.workers, best.peak_bytes, strict=True)),
    )

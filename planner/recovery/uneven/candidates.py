"""Plans for the current rates of workers (Malleus), each with its step time.

- *as planned*: the routes of the base; this also undoes a way around a worker that has recovered.
- *reshare*: its pipelines with shares by their rates.
- *partial reroute*: some micro-batches go around slow workers.
- *recut*: its pipelines with fewer layers for slow workers, and shares by that; state moves.

The base is the newest plan of templates or recut. Its routes can be restored without moving state
while its workers are there. Where the base was re-routed after a loss, only a way around slow
workers is possible: whole pipelines come from templates. Owns the candidates. Must not know which
is worth a change.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hop, Route
from oobleck.core.schedules import Schedule
from oobleck.core.units import format_bytes
from oobleck.planner.cost.estimate import estimate_step, peak_bytes, shadow_bytes
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.cost.stages import stage_cost
from oobleck.planner.programs.compiler.schedule import splits_backward
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.answer import Situation
from oobleck.planner.recovery.reroute import Spread, add_load, held_layers, merged
from oobleck.planner.recovery.rules import Rule
from oobleck.planner.recovery.uneven.cuts import recut, reshared
from oobleck.planner.search.choose import keep_schedule, settled
from oobleck.planner.search.shadows import with_shadows

# ---- Re-routing around slow workers without moving state.
#
# Some of their micro-batches pass other holders of their layers, or take another route as a
# whole. A slow worker keeps at least one, so that it is still measured. Owns the choice of micro-
# batches. Must not know the order of compute.


_Hops = tuple[Hop, ...]
#: Number of micro-batches of each way.
_Counts = Counter[_Hops]


def around(
    plan: Plan, ticks: Callable[[Hop], int], *, whole: bool, parts: Sequence[float]
) -> Sequence[Plan]:
    """Return plans from a sequence of moves that ends when no further move relieves the busiest
    worker: one plan for each of `parts`, after that part of the moves.

    Each move takes one micro-batch of the busiest worker to where the busiest of its new workers
    has least to do. With `whole`, whole routes are choices too, and win ties. `ticks` is the time
    of a micro-batch on a worker of that hop, with its rate.
    """
    moves = _Moves(plan, ticks, whole=whole)
    states = []
    while moves.make_one():
        states.append(tuple(moves.counts.items()))
    plans = []
    for number in dict.fromkeys(round(part * len(states)) for part in parts):
        if number:
            ways = states[number - 1]
            routes = tuple(Route(hops=hops, microbatches=count) for hops, count in ways if count)
            plans.append(replace(plan, routes=routes, listing=None))
    return plans


class _Moves:
    """Micro-batches counted by their ways, and the load of the workers that follows."""

    def __init__(self, plan: Plan, ticks: Callable[[Hop], int], *, whole: bool) -> None:
        self._ticks, self._whole = ticks, whole
        self._held = held_layers(plan.holds)
        self.counts: _Counts = Counter()
        self._load: Counter[WorkerId] = Counter()
        for route in plan.routes:
            self._add(route.hops, route.microbatches)
        #: Spreads of micro-batches around some workers, kept since they offer the same hops every
        #: time.
        self._spreads: dict[tuple[WorkerId, ...], Spread] = {}

    def make_one(self) -> bool:
        """Make a move that relieves the busiest worker; return whether there was one."""
        busiest = min(self._load, key=lambda worker: (-self._load[worker], worker))
        most = self._load[busiest]
        own = [hops for hops, count in self.counts.items() if count and _meets(hops, busiest)]
        if sum(self.counts[hops] for hops in own) < 2:
            return False
        best: tuple[int, _Hops, _Hops] | None = None
        for hops in own:
            self._add(hops, -1)
            for way in self._ways(hops, busiest):
                self._add(way, 1)
                load = max(self._load[w] for hop in way if hop not in hops for w in hop.workers)
                if load < most and (best is None or load < best[0]):
                    best = load, hops, way
                self._add(way, -1)
            self._add(hops, 1)
        if best is None:
            return False
        _, hops, way = best
        self._add(hops, -1)
        self._add(way, 1)
        return True

    def _ways(self, hops: _Hops, busiest: WorkerId) -> list[_Hops]:
        """Return ways without that worker for a micro-batch of these hops."""
        ways = []
        if self._whole:
            others = [way for way, n in self.counts.items() if n and not _meets(way, busiest)]
            least = min(others, key=self._most, default=None)
            if least is not None:
                ways.append(least)
        avoided = next(hop.workers for hop in hops if busiest in hop.workers)
        if avoided not in self._spreads:
            others_hold = {w: own for w, own in self._held.items() if busiest not in w}
            self._spreads[avoided] = Spread(others_hold, set(avoided), self._ticks, self._load)
        with suppress(PlanInfeasible):
            way = self._spreads[avoided].way(hops)
            for hop in way:
                if hop not in hops:  # count no work of a way that is only considered
                    add_load(self._load, hop, -self._ticks(hop))
            ways.append(merged(way))
        return ways

    def _most(self, way: _Hops) -> int:
        return max(self._load[w] + self._ticks(hop) for hop in way for w in hop.workers)

    def _add(self, hops: _Hops, count: int) -> None:
        self.counts[hops] += count
        for hop in hops:
            add_load(self._load, hop, count * self._ticks(hop))


def _meets(hops: _Hops, worker: WorkerId) -> bool:
    return any(worker in hop.workers for hop in hops)


#: Most micro-batches times hops to list-schedule: a second and a half, on all workers. Moving as
#: many of each slow worker around it takes a second or two.
MOST_VISITS = 40_000
#: Shares of all moves around slow workers to try: an order of compute allows only some.
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
#: Above so many visits only one share is tried: whole routes are the better way where shares are
#: large.
_FEW_VISITS = 2_000
#: Most stages times the square of the model's layers: a recut takes a second or two, for all
#: schedules and choices of nodes.
_MOST_CUTS = 30_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Plan that is not proven yet."""

    rule: Rule
    plan: Plan
    step_s: float


def staying_s(now: Situation) -> float:
    """Return the step time of the running plan at the current rates."""
    plan = now.running.with_rates(now.rates)
    if not listed_routes(plan):
        return estimate_step(plan, now.profile, tied=now.tied, replays=now.replays).step_s
    listing = now.running.listing
    split = listing is None or listing.split
    plan = with_listing(plan, now.profile, split=split)
    return estimate_listed(plan, now.profile, tied=now.tied, replays=now.replays).step_s


def candidates(now: Situation) -> Iterator[Candidate]:
    """Yield the candidates, in the order in which equal ones are preferred."""
    source = _whole_routes(now).with_rates(now.rates)
    if not listed_routes(source):
        yield from _of_pipelines("as planned", source, now)
        yield from _of_pipelines("reshare", reshared(source, now.profile), now)
    if source.rates:
        yield from _partial_reroutes(source, now)
    yield from recuts(source, now)


def _whole_routes(now: Situation) -> Plan:
    """Return the base's routes on the current holds, where workers still hold the layers of these
    routes; otherwise the running plan."""
    try:
        return replace(now.base, holds=now.running.holds, listing=None, rates=())
    except ValueError:
        return now.running


def _of_pipelines(rule: Rule, plan: Plan, now: Situation) -> Iterator[Candidate]:
    """Yield the plan as a candidate, if it fits into memory."""
    with suppress(PlanInfeasible):
        final, step_s = _settled(plan, now)
        yield Candidate(rule=rule, plan=final, step_s=step_s)


def _settled(plan: Plan, now: Situation) -> tuple[Plan, float]:
    """Return the settled plan of whole routes, and its step time. Raises PlanInfeasible."""
    final = settled(keep_schedule(plan, now.profile), now.profile)
    estimate = estimate_step(final, now.profile, tied=now.tied, replays=now.replays)
    # The estimate lacks workers that compute nothing.
    check_room(max([estimate.peak_bytes, *shadow_bytes(final, now.profile).values()]), now)
    return final, estimate.step_s


def recuts(source: Plan, now: Situation) -> Iterator[Candidate]:
    """Yield the best recut, if the routes are whole pipelines: under their schedule, or under 1F1B,
    which keeps least and so lets stages grow most."""
    if listed_routes(source):
        return
    stages = sum(len(pipeline.stages) for pipeline in source.pipelines)
    if stages * source.layer_count**2 > _MOST_CUTS:
        return
    schedules: tuple[Schedule, ...] = (source.schedule, "1f1b")
    cuts = [recut(source.having(schedule=s), now.profile) for s in dict.fromkeys(schedules)]
    offers = [
        each
        for plan in cuts
        if plan.holds != source.holds
        for each in _of_pipelines("recut", _with_shadows_in_place(plan, now), now)
    ]
    if offers:
        yield min(offers, key=lambda each: each.step_s)


def _with_shadows_in_place(cut: Plan, now: Situation) -> Plan:
    """Return the plan with shares by its cuts, and with the shadows that the current state allows.
    Further shadows follow at a step boundary."""
    plan = keep_schedule(reshared(cut, now.profile), now.profile)
    held = now.running.shards
    tolerated = now.shadows_for
    return with_shadows(plan, now.profile, fault_tolerance=tolerated, held=held, moving=False)


def _partial_reroutes(source: Plan, now: Situation) -> Iterator[Candidate]:
    """Yield the best partial re-route: by single hops alone, or by whole routes too."""
    ticks = hop_ticks(now.profile, source)
    visits = sum(route.microbatches * len(route.hops) for route in source.routes)
    if visits * len(source.rates) > MOST_VISITS:
        return
    many = visits > _FEW_VISITS
    best: Candidate | None = None
    for whole in (True,) if many else (False, True):
        for plan in around(source, ticks, whole=whole, parts=_PARTS[:1] if many else _PARTS):
            with suppress(PlanInfeasible):
                # For merely slow workers, a schedule that the job names decides whether backwards
                # are split.
                split = not now.schedule_named or splits_backward(plan.schedule)
                routed, step_s = scheduled(plan, now, split=split)
                if best is None or step_s < best.step_s:
                    best = Candidate(rule="partial reroute", plan=routed, step_s=step_s)
    if best is not None:
        yield best


def scheduled(plan: Plan, now: Situation, *, split: bool = True) -> tuple[Plan, float]:
    """Return the plan with its listing, and its step time. Raises PlanInfeasible.

    Routes that share no worker keep the plan's schedule. They get split backwards like the others
    where memory allows it and a step is shorter. `split`: the listed routes' backwards are split.
    """
    profile = now.profile
    routes = [plan.routes[position] for position in listed_routes(plan)]
    if not routes:  # only whole micro-batches moved
        return _settled(plan, now)
    if sum(route.microbatches * len(route.hops) for route in routes) > MOST_VISITS:
        raise PlanInfeasible("so many micro-batches on so many hops take too long to schedule")
    plan = with_listing(plan, profile, split=split)
    estimate = estimate_listed(plan, profile, tied=now.tied, replays=now.replays)
    if plan.schedule != "1f1b" and estimate.peak_bytes > profile.gpu_memory_bytes:
        plan = plan.having(schedule="1f1b")  # keeps fewest activations
        estimate = estimate_listed(plan, profile, tied=now.tied, replays=now.replays)
    check_room(estimate.peak_bytes, now)
    others = plan.having(schedule="zb-h1")
    if others != plan and not now.schedule_named and len(routes) < len(plan.routes):
        other = estimate_listed(others, profile, tied=now.tied, replays=now.replays)
        if other.peak_bytes <= profile.gpu_memory_bytes and other.step_s < estimate.step_s:
            return others, other.step_s
    return plan, estimate.step_s


def check_room(needed: int, now: Situation) -> None:
    """Raise PlanInfeasible where a worker needs more than its memory and more than the plan of
    templates needs; a shadow that takes over has activations too."""
    room = now.profile.gpu_memory_bytes
    if needed > room and needed > peak_bytes(now.base, now.profile):
        raise PlanInfeasible(
            f"taking the micro-batches needs {format_bytes(needed)} of {format_bytes(room)}; "
            "move state instead"
        )


def hop_ticks(profile: Profile, plan: Plan) -> Callable[[Hop], int]:
    """Return a function that gives the nanoseconds of a micro-batch on one worker of a hop, at the
    plan's rates. It raises PlanInfeasible where the profile has no time of a layer for so many
    workers."""
    known: dict[tuple[int, int, int, float], int] = {}

    def ticks(hop: Hop) -> int:
        # Without rates, skip a lookup that hashes each of many hops.
        rate = plan.rate(hop.workers) if plan.rates else 1.0
        key = hop.first_layer, hop.last_layer, len(hop.workers), rate
        if key not in known:
            cost = stage_cost(profile, hop.first_layer, hop.last_layer, len(hop.workers)).at(rate)
            known[key] = round((cost.forward_s + cost.backward_s) * 1e9)
        return known[key]

    return ticks

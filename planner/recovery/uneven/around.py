"""Re-routing around slow workers without moving state.

Some of their micro-batches pass other holders of their layers, or take another route as a whole. A
slow worker keeps at least one, so that it is still measured. Owns the choice of micro-batches. Must
not know the order of compute.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hop, Route
from oobleck.planner.recovery.reroute import Spread, add_load, held_layers, merged

_Hops = tuple[Hop, ...]
#: Number of micro-batches of each way.
_Counts = Counter[_Hops]


def around(
    plan: Plan, ticks: Callable[[Hop], int], *, whole: bool, parts: Sequence[float]
) -> Sequence[Plan]:
    """Return plans after these parts of all moves, from `plan` on to one in which no further move
    relieves the busiest worker.

    Each move takes one micro-batch of the busiest worker to where the busiest of its new workers
    has least to do. With `whole`, whole routes are choices too, and win ties. `ticks` is the time
    of a micro-batch on a worker of that hop, with its rate.
    """
    moves = _Moves(plan, ticks, whole=whole)
    made = []
    while moves.make_one():
        made.append(tuple(moves.counts.items()))
    found = []
    for number in dict.fromkeys(round(part * len(made)) for part in parts):
        if number:
            ways = made[number - 1]
            routes = tuple(Route(hops=hops, microbatches=count) for hops, count in ways if count)
            found.append(replace(plan, routes=routes, listing=None))
    return found


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
        found = []
        if self._whole:
            others = [way for way, n in self.counts.items() if n and not _meets(way, busiest)]
            least = min(others, key=self._most, default=None)
            if least is not None:
                found.append(least)
        avoided = next(hop.workers for hop in hops if busiest in hop.workers)
        if avoided not in self._spreads:
            others_hold = {w: own for w, own in self._held.items() if busiest not in w}
            self._spreads[avoided] = Spread(others_hold, set(avoided), self._ticks, self._load)
        with suppress(PlanInfeasible):
            way = self._spreads[avoided].way(hops)
            for hop in way:
                if hop not in hops:  # the way is only considered
                    add_load(self._load, hop, -self._ticks(hop))
            found.append(merged(way))
        return found

    def _most(self, way: _Hops) -> int:
        return max(self._load[w] + self._ticks(hop) for hop in way for w in hop.workers)

    def _add(self, hops: _Hops, count: int) -> None:
        self.counts[hops] += count
        for hop in hops:
            add_load(self._load, hop, count * self._ticks(hop))


def _meets(hops: _Hops, worker: WorkerId) -> bool:
    return any(worker in hop.workers for hop in hops)

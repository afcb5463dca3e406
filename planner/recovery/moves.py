"""Moves of one stage after a re-route: a group of workers takes over the layers of a hole.

Routes after a move take as long to compute as the re-route itself. There are as many moves as kinds
of workers times kinds of holes. So each move first gets a bound from sums alone. Routes are
computed from the least bound on, and only for few moves. Owns the moves and their order. Must not
know the step time, nor how state reaches the workers.
"""

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, Route
from oobleck.planner.recovery.reroute import Spread, add_load, held_layers, routes_around

Ticks = Callable[[Hop], int]
#: Hops to visit for micro-batches in total: a second or two. On clusters of a dozen nodes all moves
#: are computed.
MOST_VISITS = 1_000_000
#: Tolerance of a bound: hops' ticks are rounded, so a sum of them may be a little less.
_ROUNDING = 1e-6

_Group = tuple[WorkerId, ...]
#: First and last layer.
_Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Hold that replaces all other holds of its workers, including those that they share with
    others and shadows."""

    taken: Hold
    #: Load of the busiest worker.
    load: int


class Moves:
    """Moves of a re-routed plan that leave each layer on at least as many nodes as the rarest layer
    now; alike moves count as one. `base` is the plan of templates that was re-routed."""

    def __init__(self, base: Plan, running: Plan, ticks: Ticks) -> None:
        self._base, self._running, self._ticks = base, running, ticks
        self._held = held_layers(running.holds)
        self._groups = defaultdict[WorkerId, list[_Group]](list)
        for workers in self._held:
            for worker in workers:
                self._groups[worker].append(workers)
        self._hops = defaultdict[_Group, list[Hop]](list)
        for hop in _hops(base.routes):
            self._hops[hop.workers].append(hop)
        #: Hops of the base whose layers their workers no longer hold.
        self._lost = {
            hop
            for workers, hops in self._hops.items()
            for hop in hops
            if not self._held.get(workers, set()).issuperset(hop.layers)
        }
        #: Number of copies of each layer on each node, and number of nodes with each layer.
        self._copies = Counter(
            (layer, workers[0].node) for workers, layers in self._held.items() for layer in layers
        )
        self._nodes = Counter(layer for layer, _ in self._copies)
        self._bounds = _Bounds(base, self._held, ticks)
        self._gone = {worker for hop in self._lost for worker in hop.workers}
        self._load = Counter[WorkerId]()
        for route in base.routes:
            for hop in route.hops:
                if self._gone.isdisjoint(hop.workers):
                    add_load(self._load, hop, route.microbatches * ticks(hop))
        self._visits = 0

    def may_leave(self, most: float) -> bool:
        """Return whether some move may leave at most so much load on the busiest worker. True is a
        guess from bounds, False is certain."""
        return any(
            self._bounds.behind(taken, self._sharing(taken.workers)) <= most
            for taken in self._all()
        )

    def by_load(self, enough: int) -> list[Move]:
        """List moves by load, least first: all candidates for the first `enough`, as far as
        `MOST_VISITS` allows."""
        bounds = [
            (self._bounds.behind(taken, self._sharing(taken.workers)), number, taken)
            for number, taken in enumerate(self._all())
        ]
        moves: list[tuple[int, int, Move]] = []
        for bound, number, taken in sorted(bounds, key=lambda each: each[:2]):
            if self._visits > MOST_VISITS:
                break
            if len(moves) >= enough and bound > moves[enough - 1][0]:
                break
            with suppress(PlanInfeasible):
                load = self._load_behind(taken)
                insort(moves, (load, number, Move(taken=taken, load=load)))
        return [move for _, _, move in moves]

    def behind(self, taken: Hold) -> tuple[tuple[Hold, ...], tuple[Route, ...]]:
        """Return the holds and the routes after the move."""
        takers = set(taken.workers)
        holds = tuple(hold for hold in self._running.holds if takers.isdisjoint(hold.workers))
        _, held, gone = self._after(taken)
        return (*holds, taken), routes_around(self._base.routes, held, gone, self._ticks)

    def _all(self) -> Iterator[Hold]:
        # In the order of the layers.
        holes = sorted({(hop.first_layer, hop.last_layer) for hop in self._lost})
        for workers in self._different():
            for first_layer, last_layer in holes:
                taken = Hold(first_layer=first_layer, last_layer=last_layer, workers=workers)
                if not self._held[workers].issuperset(taken.layers) and self._is_safe(taken):
                    yield taken

    def _different(self) -> Iterator[_Group]:
        """Yield groups of workers that run a stage of the base together, one of each set of alike
        groups. Alike groups have the same place in pipelines with the same holes, and give up as
        much."""
        seen = set()
        places = {
            hop.workers: (number, pipeline)
            for route, pipeline in zip(self._base.routes, self._pipelines(), strict=True)
            for number, hop in enumerate(route.hops)
        }
        for workers, layers in self._held.items():
            if workers not in places:
                continue  # a shadow
            given_up = tuple(sorted(self._given_up(workers).items()))
            alike = (places[workers], tuple(sorted(layers)), given_up, len(workers))
            if alike not in seen:
                seen.add(alike)
                yield workers

    def _pipelines(self) -> Iterator[object]:
        """Yield values that are equal for alike routes of the base."""
        for route in self._base.routes:
            parts = [(hop, hop in self._lost) for hop in route.hops]
            hops = tuple((hop.layers, lost, 0 if lost else self._ticks(hop)) for hop, lost in parts)
            yield route.microbatches, hops

    def _is_safe(self, taken: Hold) -> bool:
        """Return whether each layer that is given up stays on enough other nodes."""
        node, least = taken.workers[0].node, min(self._nodes.values())
        return all(
            self._nodes[layer] > least or self._copies[layer, node] > copies
            for layer, copies in self._given_up(taken.workers).items()
            if layer not in taken.layers
        )

    def _given_up(self, workers: _Group) -> Counter[int]:
        """Count by layer the copies that are dropped when these workers get a new hold."""
        return Counter(layer for own in self._sharing(workers) for layer in self._held[own])

    def _sharing(self, workers: _Group) -> Iterable[_Group]:
        """Return the groups that hold layers together and include one of these workers."""
        return dict.fromkeys(own for worker in workers for own in self._groups[worker])

    def _after(
        self, taken: Hold
    ) -> tuple[Counter[WorkerId], dict[_Group, set[int]], set[WorkerId]]:
        """Return after the move: the load of each worker on its own routes, the held layers, and
        the workers whose hops are lost."""
        workers, held = taken.workers, self._held.copy()
        for own in self._sharing(workers):
            del held[own]
        held[workers] = set(taken.layers)
        load, gone = Counter(self._load), self._gone.difference(workers)
        for worker in workers:
            load.pop(worker, None)
        if not all(held[workers].issuperset(hop.layers) for hop in self._hops[workers]):
            return load, held, gone.union(workers)
        for route in self._base.routes:
            for hop in route.hops:
                if hop.workers == workers:
                    add_load(load, hop, route.microbatches * self._ticks(hop))
        return load, held, gone

    def _load_behind(self, taken: Hold) -> int:
        """Return the load of the busiest worker after the move. Raises PlanInfeasible."""
        load, held, gone = self._after(taken)
        spread = Spread(held, gone, self._ticks, load)
        for route in self._base.routes:
            if any(not gone.isdisjoint(hop.workers) for hop in route.hops):
                spread.fill_each(route)
        self._visits += spread.visits + len(self._held)
        return max(load.values())


#: Holder's part of a stage: its number of workers, the ticks of the whole stage, and whether it
#: holds all of that.
_Part = tuple[int, int, bool]


class _Bounds:
    """Lower bounds of the busiest worker's load, from the number of holders of some layers.

    All micro-batches pass the layers of each stage, and only holders of some of them compute there.
    """

    def __init__(self, base: Plan, held: Mapping[_Group, set[int]], ticks: Ticks) -> None:
        self._held, self._ticks = held, ticks
        self._microbatches = sum(route.microbatches for route in base.routes)
        stages = sorted({(hop.first_layer, hop.last_layer) for hop in _hops(base.routes)})
        #: Stages that have a layer.
        self._stages = defaultdict[int, list[_Interval]](list)
        for first_layer, last_layer in stages:
            for layer in range(first_layer, last_layer + 1):
                self._stages[layer].append((first_layer, last_layer))
        cuts = {first_layer for first_layer, _ in stages}
        #: Stages that overlap no other stage.
        self._whole = {s for s in stages if cuts.isdisjoint(range(s[0] + 1, s[1] + 1))}
        self._holders = {stage: Counter[_Part]() for stage in stages}
        for workers, layers in held.items():
            for stage, part in self._parts(workers, layers).items():
                self._holders[stage][part] += 1
        now = [(self._bound(stage, own), stage) for stage, own in self._holders.items()]
        self._now = sorted(now, reverse=True)

    def behind(self, taken: Hold, given_up: Iterable[_Group]) -> float:
        """Return the bound after `taken` is taken over by workers that gave up all that these
        groups hold.
        """
        before = [part for own in given_up for part in self._parts(own, self._held[own]).items()]
        now = self._parts(taken.workers, taken.layers).items()
        changed = {stage for stage, _ in (*before, *now)}
        bound = next((bound for bound, stage in self._now if stage not in changed), 0.0)
        for stage in changed:
            holders = self._holders[stage].copy()
            holders.subtract(part for own, part in before if own == stage)
            holders.update(part for own, part in now if own == stage)
            bound = max(bound, self._bound(stage, +holders))
        return bound

    def _parts(self, workers: _Group, layers: Collection[int]) -> dict[_Interval, _Part]:
        """Return the parts of stages that a holder of `layers` can compute."""
        parts = {}
        for layer in layers:
            for stage in self._stages[layer]:
                if stage not in parts:
                    whole = Hop(first_layer=stage[0], last_layer=stage[1], workers=workers)
                    holds_all = all(own in layers for own in whole.layers)
                    parts[stage] = len(workers), self._whole_ticks(whole), holds_all
        return parts

    def _whole_ticks(self, stage: Hop) -> int:
        """Return the ticks of the whole stage; 0: these workers cannot compute it."""
        try:
            return self._ticks(stage)
        except PlanInfeasible:
            return 0

    def _bound(self, stage: _Interval, holders: Counter[_Part]) -> float:
        if any(not ticks for _, ticks, _ in holders) or not holders:
            return 0.0
        fluid = self._microbatches / sum(n / ticks for (_, ticks, _), n in holders.items())
        fluid *= 1 - _ROUNDING
        if stage in self._whole and all(whole for _, _, whole in holders):
            # Each micro-batch is computed by one of these holders.
            if len(kinds := {ticks for _, ticks, _ in holders}) > 1:
                return fluid
            return float(-(-self._microbatches // holders.total()) * kinds.pop())
        return fluid if len({count for count, _, _ in holders}) == 1 else 0.0


def most_load(routes: Iterable[Route], ticks: Ticks) -> int:
    load: Counter[WorkerId] = Counter()
    for route in routes:
        for hop in route.hops:
            add_load(load, hop, route.microbatches * ticks(hop))
    return max(load.values())


def _hops(routes: Iterable[Route]) -> Iterator[Hop]:
    return (hop for route in routes for hop in route.hops)

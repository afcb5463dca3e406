"""Re-routing around lost workers without moving state: other holders of the layers take over.

ReCycle (Gandhi et al., SOSP 2024) sends micro-batches through the equal stages of the other
pipelines. Here hops on any workers that hold its layers fill a hole, several in a row where
pipelines cut the model differently. Alternatively only few workers fill holes, and pipelines
without a hole take the other micro-batches whole, so that most workers keep programs of a closed
form. Owns the choice of the hops. Must not know the order of compute.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby
from operator import itemgetter

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, LayerLost, Route

#: Workers that hold layers together.
_Group = tuple[WorkerId, ...]


def layer_count(hop: Hop) -> int:
    """Count the layers of a hop: its ticks, as if all layers and all workers were alike."""
    return len(hop.layers)


def reroute(
    plan: Plan,
    lost: Collection[WorkerId],
    *,
    generation: Generation,
    ticks: Callable[[Hop], int] = layer_count,
    helpers: int | None = None,
    waits: int = 3,
) -> Plan:
    """Return the plan without the `lost` workers: survivors keep their holds, and routes through
    lost workers use others. Each micro-batch goes where the busiest worker then has least to do.

    `ticks` is the time of a micro-batch on a worker of that hop, with its rate. It raises
    PlanInfeasible for a hop that these workers cannot compute. `helpers`: the workers of at most so
    many routes fill a hole, and routes without one take whole micro-batches; by default none does,
    and all may help. `waits`: see `_FewHelpers`. Raises LayerLost, and PlanInfeasible where holders
    of the layers cannot compute them or cannot follow each other.
    """
    gone = set(lost)
    holds = tuple(hold for hold in plan.holds if gone.isdisjoint(hold.workers))
    if missing := set(range(plan.layer_count)).difference(*{hold.layers for hold in holds}):
        raise LayerLost(missing)
    if helpers is None:
        routes = routes_around(plan.routes, held_layers(holds), gone, ticks)
    else:
        held = held_layers(holds) if helpers else {}
        routes = _FewHelpers(plan.routes, held, gone, ticks, helpers, waits).routes()
    return Plan(generation=generation, holds=holds, routes=routes, schedule=plan.schedule)


def held_layers(holds: Iterable[Hold]) -> dict[_Group, set[int]]:
    """Return the layers held, by the workers that hold them together."""
    held: dict[_Group, set[int]] = {}
    for hold in holds:
        held.setdefault(hold.workers, set()).update(hold.layers)
    return held


def routes_around(
    routes: Iterable[Route],
    held: dict[_Group, set[int]],
    lost: set[WorkerId],
    ticks: Callable[[Hop], int],
) -> tuple[Route, ...]:
    """Re-route `routes` around `lost` workers: hops of workers that hold the layers replace hops
    through lost ones. Each micro-batch goes where the busiest worker then has least to do. Raises
    PlanInfeasible."""
    routes, load = tuple(routes), Counter[WorkerId]()
    for route in routes:
        for hop in route.hops:
            if lost.isdisjoint(hop.workers):
                add_load(load, hop, route.microbatches * ticks(hop))
    spread = Spread(held, lost, ticks, load)
    around = [spread.around(route) for route in routes]
    begins = Counter(way[0].workers for ways in around for way, _ in ways)
    counts: Counter[tuple[Hop, ...]] = Counter()
    ordered: list[Route | tuple[Hop, ...]] = []
    for route, ways in zip(routes, around, strict=True):
        if len(ways) == 1 and ways[0][0] is route.hops and begins[route.hops[0].workers] == 1:
            # No other way has these hops, so they need not be counted: hashing all hops of a large
            # plan takes long.
            ordered.append(route)
            continue
        for way, number in ways:
            if way not in counts:
                ordered.append(way)
            counts[way] += number
    return tuple(
        entry if isinstance(entry, Route) else Route(hops=entry, microbatches=counts[entry])
        for entry in ordered
    )


#: Load of the busiest of its workers, number of hops, and the hops.
_Way = tuple[int, int, tuple[Hop, ...]]
#: Runs of a route's hops, and whether their workers live.
_Parts = list[tuple[bool, list[Hop]]]
#: Hops in place of those of each hole.
_Fillings = tuple[tuple[Hop, ...], ...]


class Spread:
    """Spread of micro-batches around the `lost` workers, each on the best way by the `load` of each
    worker. `held`: layers of each group of workers."""

    def __init__(
        self,
        held: dict[_Group, set[int]],
        lost: set[WorkerId],
        ticks: Callable[[Hop], int],
        load: Counter[WorkerId],
    ) -> None:
        self._held, self._lost, self._ticks, self._load = held, lost, ticks, load
        self._offered: dict[tuple[int, int], tuple[tuple[Hop, int], ...]] = {}
        #: True if no workers hold layers together.
        self._alone = all(len(group) == 1 for group in held)
        #: By hole: its offers, if each offer is a single worker that fills the whole hole.
        self._whole: dict[tuple[int, int], Sequence[tuple[Hop, int, WorkerId]]] = {}
        #: Number of hops visited.
        self.visits = 0

    def around(self, route: Route) -> Sequence[tuple[tuple[Hop, ...], int]]:
        """Return the hops that the route's micro-batches take, with their number of
        micro-batches.
        """
        parts = self.parts(route.hops)
        if all(lives for lives, _ in parts):
            return [(route.hops, route.microbatches)]
        ways = Counter[_Fillings]()
        for count in bundles(route.microbatches):
            ways[self.fill(parts, count)] += count
        return [(joined(parts, fillings), count) for fillings, count in ways.items()]

    def way(self, passed: tuple[Hop, ...]) -> list[Hop]:
        """Choose the way of one more micro-batch, and count its work: these hops, with others in
        place of those on lost workers. Raises PlanInfeasible, with nothing counted."""
        self.visits += len(passed)
        parts = self.parts(passed)
        return _in_place(parts, self.fill(parts))

    def fill_each(self, route: Route) -> None:
        """Count the work of the route's micro-batches, each on its own way. Raises
        PlanInfeasible."""
        self.visits += route.microbatches * len(route.hops)
        parts = self.parts(route.hops)
        for _ in range(route.microbatches):
            self.fill(parts)

    def parts(self, hops: Iterable[Hop]) -> _Parts:
        """Split the hops into alternating runs of live hops and of lost ones (the holes)."""
        return [(lives, list(run)) for lives, run in groupby(hops, self._lives)]

    def fill(self, parts: _Parts, microbatches: int = 1) -> _Fillings:
        """Choose hops for each hole, for so many more micro-batches, and count their work. Raises
        PlanInfeasible, with nothing counted."""
        fillings: list[tuple[Hop, ...]] = []
        for number, (lives, hops) in enumerate(parts):
            if lives:
                continue
            before = parts[number - 1][1][-1].workers if number else ()
            after = parts[number + 1][1][0].workers if number + 1 < len(parts) else ()
            first_layer, last_layer = hops[0].first_layer, hops[-1].last_layer
            filling: tuple[Hop, ...] | None
            whole = self._offers_whole(first_layer, last_layer)
            if whole and len(before) <= 1 and len(after) <= 1:
                fillings.append((self._least_busy(whole, microbatches),))
                continue
            if self._alone and len(before) <= 1 and len(after) <= 1:
                best = self._best(first_layer, last_layer, {})
                filling = None if best is None else best[2]
            else:
                ways = self._ways(first_layer, last_layer, after, {})
                filling = next((w[2] for w in ways if _can_follow(before, w[2][0].workers)), None)
            if filling is None:
                self.count(fillings, -microbatches)
                raise PlanInfeasible(
                    f"no workers that hold layers {first_layer} to {last_layer} can compute them "
                    "and follow each other: some share layers with different workers, or the "
                    "profile has no time of a layer for so few of them; move state instead"
                )
            self.count([filling], microbatches)
            fillings.append(filling)
        return tuple(fillings)

    def _offers_whole(
        self, first_layer: int, last_layer: int
    ) -> Sequence[tuple[Hop, int, WorkerId]]:
        """Return the offers for a hole if each is a single worker that fills the whole hole; else
        none."""
        key = first_layer, last_layer
        if key not in self._whole:
            offers = self._offers(*key) if self._alone else ()
            whole = all(hop.last_layer == last_layer for hop, _ in offers)
            self._whole[key] = [(hop, each, hop.workers[0]) for hop, each in offers if whole]
        return self._whole[key]

    def _least_busy(self, offers: Sequence[tuple[Hop, int, WorkerId]], microbatches: int) -> Hop:
        """Choose the offer as `_best` does, and count its work."""
        load, least, best = self._load, -1, offers[0]
        self.visits += len(offers)
        for offer in offers:
            busy = load.get(offer[2], 0) + offer[1]
            if least < 0 or busy < least:
                least, best = busy, offer
        hop, each, worker = best
        load[worker] = load.get(worker, 0) + microbatches * each
        return hop

    def count(self, fillings: Iterable[tuple[Hop, ...]], microbatches: int) -> None:
        """Add the work of so many micro-batches there to the load."""
        for hop in chain.from_iterable(fillings):
            add_load(self._load, hop, microbatches * self._ticks(hop))

    def _best(self, layer: int, last_layer: int, known: dict[int, _Way | None]) -> _Way | None:
        """Return the best way from `layer` on, the first of `_ways`. Only for layers that single
        workers hold: there any worker can follow any other."""
        if layer in known:
            return known[layer]
        load, least, fewest = self._load, 0, 0
        best: tuple[Hop, _Way | None] | None = None
        offers = self._offers(layer, last_layer)
        self.visits += len(offers)
        for hop, ticks in offers:
            busiest, number = load[hop.workers[0]] + ticks, 1
            rest = None
            if hop.last_layer != last_layer:
                rest = self._best(hop.last_layer + 1, last_layer, known)
                if rest is None:
                    continue
                busiest, number = max(busiest, rest[0]), rest[1] + 1
            if best is None or busiest < least or (busiest == least and number < fewest):
                best, least, fewest = (hop, rest), busiest, number
        known[layer] = None
        if best is not None:
            hop, rest = best
            known[layer] = least, fewest, (hop,) if rest is None else (hop, *rest[2])
        return known[layer]

    def _ways(
        self, layer: int, last_layer: int, after: _Group, known: dict[int, list[_Way]]
    ) -> list[_Way]:
        """Return the ways from `layer` on, best first: for each first hop the best way to the
        workers that come after. Each hop goes as far as its workers hold the layers."""
        if layer in known:
            return known[layer]
        ways: list[_Way] = []
        offers = self._offers(layer, last_layer)
        self.visits += len(offers)
        for hop, ticks in offers:
            workers = hop.workers
            if len(workers) == 1:
                load = self._load[workers[0]] + ticks
            else:
                load = max([self._load[worker] for worker in workers]) + ticks
            if hop.last_layer == last_layer:
                if not after or _can_follow(workers, after):
                    ways.append((load, 1, (hop,)))
                continue
            for rest in self._ways(hop.last_layer + 1, last_layer, after, known):
                if _can_follow(hop.workers, rest[2][0].workers):
                    ways.append((max(load, rest[0]), rest[1] + 1, (hop, *rest[2])))
                    break
        # Sorting is stable: among equals the order of the holds decides.
        known[layer] = sorted(ways, key=itemgetter(0, 1))
        return known[layer]

    def _offers(self, layer: int, last_layer: int) -> tuple[tuple[Hop, int], ...]:
        """Return all hops that can compute `layer` and as many following layers as held, with their
        ticks, in the order of the holds."""
        if (layer, last_layer) not in self._offered:
            offers = []
            for workers, layers in self._held.items():
                if layer in layers:
                    end = layer
                    while end < last_layer and end + 1 in layers:
                        end += 1
                    hop = Hop(first_layer=layer, last_layer=end, workers=workers)
                    with suppress(PlanInfeasible):
                        offers.append((hop, self._ticks(hop)))
            self._offered[layer, last_layer] = tuple(offers)
        return self._offered[layer, last_layer]

    def _lives(self, hop: Hop) -> bool:
        return self._lost.isdisjoint(hop.workers)


def joined(parts: _Parts, fillings: _Fillings) -> tuple[Hop, ...]:
    """Return the hops of a way with these fillings of its holes."""
    return merged(_in_place(parts, fillings))


def _in_place(parts: _Parts, fillings: _Fillings) -> list[Hop]:
    left = iter(fillings)
    return [hop for lives, hops in parts for hop in (hops if lives else next(left))]


#: Most bundles in which a route's micro-batches are spread: the busiest worker then has at most a
#: hundredth of the route more than it has to.
_MOST_BUNDLES = 100


def bundles(microbatches: int) -> Iterator[int]:
    """Yield the sizes of the bundles in which so many micro-batches are spread."""
    size = max(1, microbatches // _MOST_BUNDLES)
    for first in range(0, microbatches, size):
        yield min(size, microbatches - first)


def add_load(load: Counter[WorkerId], hop: Hop, ticks: int) -> None:
    for worker in hop.workers:
        load[worker] = load.get(worker, 0) + ticks


def _can_follow(before: _Group, after: _Group) -> bool:
    """Return whether two successive hops share no worker, or have the same workers."""
    if len(before) == len(after) == 1:
        return True
    return before == after or set(before).isdisjoint(after)


def merged(way: Iterable[Hop]) -> tuple[Hop, ...]:
    """Merge successive hops on the same workers into one."""
    return tuple(
        Hop(first_layer=own[0].first_layer, last_layer=own[-1].last_layer, workers=workers)
        for workers, own in (
            (workers, list(hops)) for workers, hops in groupby(way, lambda hop: hop.workers)
        )
    )


#: Each hop's workers, with the hop's ticks; a worker of two hops is there twice.
_Work = Sequence[tuple[WorkerId, int]]


def _work_of(hops: Iterable[Hop], ticks: Callable[[Hop], int]) -> _Work:
    return [(worker, each) for hop in hops for each in (ticks(hop),) for worker in hop.workers]


def _add(load: Counter[WorkerId], work: _Work, microbatches: int) -> None:
    for worker, each in work:
        load[worker] = load.get(worker, 0) + microbatches * each


#: Forward, input gradient and weight gradient. While a pipeline fills and drains, its workers wait
#: for all three of the other stages' micro-batch, or for one where the backward is split.
_PARTS = 3


class _FewHelpers:
    """Spread of the micro-batches of routes with holes over at most so many `helpers`, other routes
    whose workers fill the holes, and over all routes without one, which take them whole.

    Each goes where its workers are expected to be done first; holes are filled in a tie.
    `waits` says for how many of a micro-batch's three parts the workers of a route that shares none
    wait while it fills and drains.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        held: dict[_Group, set[int]],
        lost: set[WorkerId],
        ticks: Callable[[Hop], int],
        helpers: int,
        waits: int,
    ) -> None:
        self._routes, self._ticks, self._lost = routes, ticks, lost
        self._hit = [any(not lost.isdisjoint(h.workers) for h in r.hops) for r in routes]
        self._load = Counter[WorkerId]()
        #: By route without a hole: its workers with their ticks, and the ticks that they wait.
        self._own: dict[int, _Work] = {}
        self._wait: dict[int, int] = {}
        for number, (route, hit) in enumerate(zip(routes, self._hit, strict=True)):
            if not hit:
                self._own[number] = _work_of(route.hops, ticks)
                _add(self._load, self._own[number], route.microbatches)
        helping = self._helping(held, helpers) if helpers else set[_Group]()
        some = {group: layers for group, layers in held.items() if group in helping}
        self._spread = Spread(some, lost, ticks, self._load) if helpers else None
        #: Expected end of one more micro-batch there, or a lower bound, and the route.
        self._whole: list[tuple[int, int]] = []
        for number in self._own:
            taken = [ticks(hop) for hop in routes[number].hops]
            helps = bool(helping) and any(hop.workers in helping for hop in routes[number].hops)
            wait = (sum(taken) - max(taken)) * (1 if helps else waits) // _PARTS
            self._wait[number] = wait
            self._whole.append(((routes[number].microbatches + 1) * max(taken) + wait, number))
        heapq.heapify(self._whole)

    def _end(self, number: int) -> int:
        """Return the expected end of one more micro-batch on a whole route."""
        load = self._load
        return max([load[w] + taken for w, taken in self._own[number]]) + self._wait[number]

    def _helping(self, held: dict[_Group, set[int]], helpers: int) -> set[_Group]:
        """Return the groups of the routes that help: for each hole those whose workers have least
        to do."""
        groups: set[_Group] = set()
        passing: dict[_Group, list[int]] = {}
        for number, other in enumerate(self._routes):
            for hop in other.hops:
                passing.setdefault(hop.workers, []).append(number)
        holes: dict[tuple[tuple[int, int], ...], _Parts] = {}
        for route in self._routes_hit():
            parts = Spread(held, self._lost, self._ticks, self._load).parts(route.hops)
            key = tuple((o[0].first_layer, o[-1].last_layer) for lives, o in parts if not lives)
            holes.setdefault(key, parts)
        for parts in holes.values():
            left = dict(held)
            for _ in range(helpers):
                spread = Spread(left, self._lost, self._ticks, self._load)
                try:
                    fillings = spread.fill(parts)
                except PlanInfeasible:
                    break
                spread.count(fillings, -1)
                for hop in chain.from_iterable(fillings):
                    groups.add(hop.workers)
                    for number in passing.get(hop.workers, ()):
                        groups.update(h.workers for h in self._routes[number].hops)
                left = {group: layers for group, layers in left.items() if group not in groups}
        return groups.intersection(held)

    def _routes_hit(self) -> list[Route]:
        return [route for route, hit in zip(self._routes, self._hit, strict=True) if hit]

    def routes(self) -> tuple[Route, ...]:
        """Return all routes without lost workers. Raises PlanInfeasible."""
        counts: Counter[tuple[Hop, ...]] = Counter()
        taken = [0] * len(self._routes)
        for route in self._routes_hit():
            ways: Counter[_Fillings] = Counter()
            parts: _Parts = [] if self._spread is None else self._spread.parts(route.hops)
            living = [hop for lives, hops in parts if lives for hop in hops]
            wait, own = sum(map(self._ticks, living)) // _PARTS, _work_of(living, self._ticks)
            for count in bundles(route.microbatches):
                number, whole_end = self._best_whole()
                if self._spread is not None:
                    fillings = self._spread.fill(parts, count)
                    _add(self._load, own, count)
                    if number is None or self._busiest(fillings, own) + wait <= whole_end:
                        ways[fillings] += count
                        continue
                    _add(self._load, own, -count)
                    self._spread.count(fillings, -count)
                if number is None:
                    raise PlanInfeasible("no pipeline is left that could take the micro-batches")
                taken[number] += count
                _add(self._load, self._own[number], count)
            counts.update({joined(parts, filled): many for filled, many in ways.items()})
        rerouted = Counter[tuple[Hop, ...]]()
        for number, route in enumerate(self._routes):
            if not self._hit[number]:
                rerouted[route.hops] += route.microbatches + taken[number]
        rerouted.update(counts)
        return tuple(Route(hops=hops, microbatches=count) for hops, count in rerouted.items())

    def _busiest(self, fillings: _Fillings, own: _Work) -> int:
        """Return the load of the busiest worker of these hops, and of its `own` ones."""
        load = self._load
        filling = [load[w] for hop in chain.from_iterable(fillings) for w in hop.workers]
        return max(filling + [load[w] for w, _ in own])

    def _best_whole(self) -> tuple[int | None, int]:
        """Return the route that would be done first with one more whole micro-batch, and when."""
        while self._whole:
            known, number = self._whole[0]
            end = self._end(number)
            if end == known:
                return number, end
            heapq.heapreplace(self._whole, (end, number))
        return None, 0

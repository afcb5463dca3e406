"""Re-routing around lost workers without moving state: other holders of the layers take over.

ReCycle (Gandhi et al., SOSP 2024) sends micro-batches through the equal stages of the other
pipelines. Here a hole is covered by hops on any workers that hold its layers, several in a row
where pipelines cut the model differently. Owns the choice of the hops. Must not know the order of
compute.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from operator import itemgetter

from oobleck.core.errors import LayerLost, PlanInfeasible
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, Route

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
) -> Plan:
    """Return the plan without the `lost` workers: survivors keep their holds, and routes through
    lost workers use others. Each micro-batch goes where the busiest worker then has least to do.

    `ticks` is the time of a micro-batch on a worker of that hop, with its rate. It raises
    PlanInfeasible for a hop that these workers cannot compute. Raises LayerLost, and PlanInfeasible
    where holders of the layers cannot compute them or cannot follow each other.
    """
    gone = set(lost)
    holds = tuple(hold for hold in plan.holds if gone.isdisjoint(hold.workers))
    held = held_layers(holds)
    if missing := set(range(plan.layer_count)).difference(*held.values()):
        raise LayerLost(missing)
    return Plan(
        generation=generation,
        holds=holds,
        routes=routes_around(plan.routes, held, gone, ticks),
        schedule=plan.schedule,
    )


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
    found: list[Route | tuple[Hop, ...]] = []
    for route, ways in zip(routes, around, strict=True):
        if len(ways) == 1 and ways[0][0] is route.hops and begins[route.hops[0].workers] == 1:
            # No other way has these hops. Hashing all hops of a large plan takes long.
            found.append(route)
            continue
        for way, number in ways:
            if way not in counts:
                found.append(way)
            counts[way] += number
    return tuple(
        one if isinstance(one, Route) else Route(hops=one, microbatches=counts[one])
        for one in found
    )


#: Load of the busiest of its workers, number of hops, and the hops.
_Way = tuple[int, int, tuple[Hop, ...]]


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
        #: Number of hops visited.
        self.visits = 0

    def around(self, route: Route) -> Sequence[tuple[tuple[Hop, ...], int]]:
        """Return the hops that the route's micro-batches take, with their number of
        micro-batches.
        """
        if all(map(self._lives, route.hops)):
            return [(route.hops, route.microbatches)]
        ways = Counter(merged(self.way(route.hops)) for _ in range(route.microbatches))
        return list(ways.items())

    def way(self, passed: tuple[Hop, ...]) -> list[Hop]:
        """Choose the way of one more micro-batch, and count its work: these hops, with others in
        place of those on lost workers. Raises PlanInfeasible, with nothing counted."""
        way: list[Hop] = []
        counted: list[Hop] = []
        self.visits += len(passed)
        parts = [(lives, list(hops)) for lives, hops in groupby(passed, self._lives)]
        for number, (lives, hops) in enumerate(parts):
            if lives:
                way += hops
                continue
            before = way[-1].workers if way else ()
            after = parts[number + 1][1][0].workers if number + 1 < len(parts) else ()
            first_layer, last_layer = hops[0].first_layer, hops[-1].last_layer
            ways = self._ways(first_layer, last_layer, after, {})
            found = next((w for w in ways if _can_follow(before, w[2][0].workers)), None)
            if found is None:
                for hop in counted:
                    add_load(self._load, hop, -self._ticks(hop))
                raise PlanInfeasible(
                    f"no workers that hold layers {first_layer} to {last_layer} can compute them "
                    "and follow each other: some share layers with different workers, or the "
                    "profile has no time of a layer for so few of them; move state instead"
                )
            for hop in found[2]:
                add_load(self._load, hop, self._ticks(hop))
            counted += found[2]
            way += found[2]
        return way

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


def add_load(load: Counter[WorkerId], hop: Hop, ticks: int) -> None:
    for worker in hop.workers:
        load[worker] += ticks


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

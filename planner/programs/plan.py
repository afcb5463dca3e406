"""The plan: what each worker holds, and the routes that the micro-batches take, for one generation.

A holder of a layer need not compute it for every micro-batch, or for any. A plan of templates is
one route per pipeline, through all that the pipeline's workers hold.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType

from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.programs.listing.ticks import Listing
from oobleck.planner.programs.pipeline import Pipeline
from oobleck.planner.programs.rates import WorkerRate, check_rates, slow_workers
from oobleck.planner.programs.routes import Hold, Hop, Route
from oobleck.planner.programs.shards import Shard, ShardTable
from oobleck.planner.schedules import Schedule


class _Derived:
    """Cache of what follows from a plan and is asked for again and again: worked out once, when it
    first is.

    No fields of the plan, so neither compared nor written anywhere.
    """

    __slots__ = (
        "_hash",
        "_held",
        "_nodes",
        "_pipelines",
        "_rates",
        "_shadows",
        "_shards",
        "_shares",
        "_workers",
    )
    _hash: int
    _held: Mapping[WorkerId, tuple[int, ...]]
    _nodes: tuple[NodeName, ...]
    _pipelines: tuple[Pipeline, ...]
    _rates: Mapping[WorkerId, float]
    _shadows: Mapping[WorkerId, tuple[int, ...]]
    _shards: ShardTable
    _shares: tuple[range, ...]
    _workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(_Derived):
    """Plan of one generation: who holds which layer and computes which micro-batches.

    The routes take the micro-batches of the global batch in their order, so that each is in exactly
    one of them. Ranks are positions in `workers`.
    """

    generation: Generation
    holds: tuple[Hold, ...]
    routes: tuple[Route, ...]
    #: The order of compute on workers that stand in one hop alone.
    schedule: Schedule = "1f1b"
    #: For the order on all others; None: there are none.
    listing: Listing | None = None
    #: Of workers that are slower than profiled, sorted; the listing counts them in.
    rates: tuple[WorkerRate, ...] = ()

    def __post_init__(self) -> None:
        if not self.routes:
            raise ValueError("a plan needs at least one route")
        if len({route.hops[-1].last_layer for route in self.routes}) > 1:
            raise ValueError("the routes disagree on the number of layers")
        if self.holds and max(hold.last_layer for hold in self.holds) >= self.layer_count:
            raise ValueError(f"a layer is held that is none of the model's {self.layer_count}")
        _check_once(self.holds)
        _check_held(self.routes, self.holds)
        check_rates(self.rates, self.workers if self.rates else ())
        if self.listing is not None:
            lengths = [len(hops) for hops in self.listing.hops]
            if lengths != [len(route.hops) for route in self.routes]:
                raise ValueError("the listing's hops are not those of the routes")
            if len(self.listing.room) != len(self.workers):
                raise ValueError("the listing's room is not that of the workers")

    @classmethod
    def of_pipelines(
        cls,
        pipelines: Iterable[Pipeline],
        *,
        generation: Generation,
        schedule: Schedule = "1f1b",
    ) -> "Plan":
        """Each pipeline has one route, through all of its stages. Raises ValueError."""
        given = tuple(pipelines)
        nodes = [node for pipeline in given for node in pipeline.nodes]
        if len(set(nodes)) != len(nodes):
            raise ValueError(f"a node stands in two pipelines: {sorted(nodes)}")
        return cls(
            generation=generation,
            holds=tuple(stage for pipeline in given for stage in pipeline.stages),
            routes=tuple(
                Route(
                    hops=tuple(
                        Hop(
                            first_layer=stage.first_layer,
                            last_layer=stage.last_layer,
                            workers=stage.workers,
                        )
                        for stage in pipeline.stages
                    ),
                    microbatches=pipeline.microbatches,
                )
                for pipeline in given
            ),
            schedule=schedule,
        )

    @property
    def microbatches(self) -> int:
        return sum(route.microbatches for route in self.routes)

    @property
    def layer_count(self) -> int:
        return self.routes[0].hops[-1].last_layer + 1

    @property
    def shares(self) -> tuple[range, ...]:
        """The micro-batches of each route."""
        try:
            return self._shares
        except AttributeError:
            ends = accumulate((route.microbatches for route in self.routes), initial=0)
            found = tuple(range(first, stop) for first, stop in pairwise(ends))
            object.__setattr__(self, "_shares", found)
            return found

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The routes as pipelines; those of a plan of templates are the ones that it is made of."""
        try:
            return self._pipelines
        except AttributeError:
            holds = {(h.first_layer, h.last_layer, h.workers): h for h in self.holds}
            found = []
            for route in self.routes:
                stages = tuple(
                    holds.get((hop.first_layer, hop.last_layer, hop.workers))
                    or Hold(
                        first_layer=hop.first_layer, last_layer=hop.last_layer, workers=hop.workers
                    )
                    for hop in route.hops
                )
                nodes = dict.fromkeys(stage.workers[0].node for stage in stages)
                found.append(
                    Pipeline(nodes=tuple(nodes), stages=stages, microbatches=route.microbatches)
                )
            object.__setattr__(self, "_pipelines", tuple(found))
            return self._pipelines

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        try:
            return self._nodes
        except AttributeError:
            found = tuple(sorted({hold.workers[0].node for hold in self.holds}))
            object.__setattr__(self, "_nodes", found)
            return found

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Workers of the plan, all of them in rank order (sorted)."""
        try:
            return self._workers
        except AttributeError:
            found = tuple(sorted({worker for hold in self.holds for worker in hold.workers}))
            object.__setattr__(self, "_workers", found)
            return found

    @property
    def shards(self) -> ShardTable:
        """Shards that each worker holds: worker p of d of a hold has the p-th d-th of each of its
        layers' state. Equal sets are one object."""
        try:
            return self._shards
        except AttributeError:
            found: dict[WorkerId, frozenset[Shard]] = {}
            for hold in self.holds:
                parts = len(hold.workers)
                for part, worker in enumerate(hold.workers):
                    own = _shards(hold.first_layer, hold.last_layer, part, parts)
                    found[worker] = found[worker] | own if worker in found else own
            object.__setattr__(self, "_shards", MappingProxyType(found))
            return self._shards

    @property
    def held(self) -> Mapping[WorkerId, tuple[int, ...]]:
        """The layers that each worker holds, or has a part of; sorted."""
        try:
            return self._held
        except AttributeError:
            found: dict[WorkerId, tuple[int, ...]] = {}
            for hold in self.holds:
                for worker in hold.workers:
                    own = tuple(hold.layers)
                    found[worker] = tuple(sorted(found[worker] + own)) if worker in found else own
            object.__setattr__(self, "_held", MappingProxyType(found))
            return self._held

    @property
    def shadows(self) -> Mapping[WorkerId, tuple[int, ...]]:
        """The layers that workers hold and do not run; sorted, without workers that have none."""
        try:
            return self._shadows
        except AttributeError:
            hops = [hop for route in self.routes for hop in route.hops]
            whole = {(hop.first_layer, hop.last_layer, hop.workers) for hop in hops}
            rest = [h for h in self.holds if (h.first_layer, h.last_layer, h.workers) not in whole]
            run: dict[WorkerId, set[int]] = {w: set() for hold in rest for w in hold.workers}
            for hop in hops if rest else ():
                for worker in hop.workers:
                    if worker in run:
                        run[worker].update(hop.layers)
            idle = {worker: set(self.held[worker]) - layers for worker, layers in run.items()}
            found = {worker: tuple(sorted(idle[worker])) for worker in sorted(idle) if idle[worker]}
            object.__setattr__(self, "_shadows", MappingProxyType(found))
            return self._shadows

    def layer_nodes(self) -> list[set[NodeName]]:
        """The nodes that hold each layer; each of them has all of it."""
        nodes: list[set[NodeName]] = [set() for _ in range(self.layer_count)]
        for hold in self.holds:
            for layer in hold.layers:
                nodes[layer].add(hold.workers[0].node)
        return nodes

    def __hash__(self) -> int:
        """Return the hash, computed once: for a thousand nodes it takes milliseconds, and whatever
        is remembered asks for it."""
        try:
            return self._hash
        except AttributeError:
            fields = self.generation, self.holds, self.routes, self.schedule
            found = hash((*fields, self.listing, self.rates))
            object.__setattr__(self, "_hash", found)
            return found

    def rate(self, workers: Iterable[WorkerId]) -> float:
        """Return the rate of what these workers compute in step: that of the slowest one."""
        if not self.rates:
            return 1.0
        try:
            rates = self._rates
        except AttributeError:
            rates = {one.worker: one.rate for one in self.rates}
            object.__setattr__(self, "_rates", rates)
        return min(rates.get(worker, 1.0) for worker in workers)

    def with_rates(self, rates: Mapping[WorkerId, float]) -> "Plan":
        """The plan where its workers have these rates, those that are not named their profiled
        one; rates of others are ignored. Without a listing, which counts rates in."""
        slow = slow_workers(rates, self.workers)
        own = tuple(WorkerRate(worker=worker, rate=rates[worker]) for worker in slow)
        return replace(self, rates=own, listing=None)

    def hold_of(self, worker: WorkerId, layer: int) -> Hold:
        """Return the hold by which `worker` holds `layer`. Raises ValueError where it does not."""
        for hold in self.holds:
            if layer in hold.layers and worker in hold.workers:
                return hold
        raise ValueError(
            f"worker {worker} does not hold layer {layer} in generation {self.generation}"
        )

    def owners(self, layer: int) -> tuple[WorkerId, ...]:
        """The workers that hold `layer`, sorted."""
        return tuple(sorted(w for hold in self.holds if layer in hold.layers for w in hold.workers))


# Plans come from agents, too: no check may go through all layers that a plan says it has.


def _check_once(holds: Iterable[Hold]) -> None:
    held: dict[WorkerId, list[range]] = {}
    for hold in holds:
        for worker in hold.workers:
            held.setdefault(worker, []).append(hold.layers)
    for worker, own in held.items():
        for before, after in pairwise(sorted(own, key=_start)):
            if after.start < before.stop:
                raise ValueError(f"{worker} holds layer {after.start} twice")


def _check_held(routes: Iterable[Route], holds: Iterable[Hold]) -> None:
    """Each hop's layers are held by its workers, together and in the same order."""
    held: dict[tuple[WorkerId, ...], list[range]] = {}
    for hold in holds:
        held.setdefault(hold.workers, []).append(hold.layers)
    for own in held.values():
        own.sort(key=_start)
    for route in routes:
        for hop in route.hops:
            layer = hop.first_layer
            for layers in held.get(hop.workers, ()):
                if layer in layers:
                    layer = layers.stop
            if layer <= hop.last_layer:
                names = ", ".join(map(str, hop.workers))
                raise ValueError(
                    f"{names} compute layer {layer}, which they do not hold in these shares"
                )


def _start(layers: range) -> int:
    return layers.start


@lru_cache(maxsize=1024)
def _shards(first_layer: int, last_layer: int, part: int, parts: int) -> frozenset[Shard]:
    return frozenset(Shard(layer, part, parts) for layer in range(first_layer, last_layer + 1))

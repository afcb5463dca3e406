"""Plans: who holds which layers and computes which micro-batches, and the templates behind them.

A pipeline template is a stage partition of the whole model over n nodes (Oobleck §4.1). A pipeline
is a template with nodes in its places; a plan is one generation's pipelines, or the routes that
micro-batches take where it is not made of whole pipelines. Must not know how a plan is chosen.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TypedDict, Unpack

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.routes import Hold, Hop, Listing, Route, Shard, ShardTable
from oobleck.core.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTemplate:
    """Contiguous layers on `gpus` workers of the template's node number `node`."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    #: 0-based position of the node inside the template.
    node: int
    gpus: int
    #: One micro-batch through all layers of the stage.
    forward_s: float
    backward_s: float

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTemplate:
    """Whole model cut into stages for `nodes` nodes; not yet on any concrete node."""

    nodes: int
    gpus_per_node: int
    stages: tuple[StageTemplate, ...]
    #: T1 + T2 + T3 with Nb = 4 * stages micro-batches (Oobleck §4.1.2).
    iteration_s: float

    def __post_init__(self) -> None:
        used = [0] * self.nodes
        next_layer, node = 0, 0
        for stage in self.stages:
            if stage.first_layer != next_layer or stage.last_layer < stage.first_layer:
                raise ValueError(f"stages are not contiguous at layer {next_layer}")
            if stage.node < node or stage.gpus < 1:
                raise ValueError("stages must follow the node order and have at least one GPU")
            next_layer, node = stage.last_layer + 1, stage.node
            used[stage.node] += stage.gpus
        if any(gpus != self.gpus_per_node for gpus in used):
            raise ValueError(f"every GPU must be used; used per node: {used}")

    @property
    def layer_count(self) -> int:
        return self.stages[-1].last_layer + 1


#: Templates by their numbers of nodes.
Templates = Mapping[int, PipelineTemplate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Template placed on concrete nodes: one replica of the model."""

    #: Nodes in template order: nodes[k] is the template's node number k.
    nodes: tuple[NodeName, ...]
    stages: tuple[Hold, ...]
    #: Micro-batches of the global batch that it computes in every step.
    microbatches: int

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline needs at least one stage")
        if self.microbatches < 1:
            raise ValueError("a pipeline needs at least one micro-batch")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"a node is twice in one pipeline: {self.nodes}")


def place(
    template: PipelineTemplate, nodes: tuple[NodeName, ...], *, microbatches: int
) -> Pipeline:
    """Put `template` on `nodes`; the GPUs of a node go to its stages in slot order."""
    if len(nodes) != template.nodes:
        raise ValueError(f"a template of {template.nodes} nodes needs as many, got {len(nodes)}")
    next_slot = dict.fromkeys(range(template.nodes), 0)
    stages = []
    for stage in template.stages:
        slot = next_slot[stage.node]
        next_slot[stage.node] = slot + stage.gpus
        workers = tuple(WorkerId(nodes[stage.node], slot + gpu) for gpu in range(stage.gpus))
        stages.append(
            Hold(first_layer=stage.first_layer, last_layer=stage.last_layer, workers=workers)
        )
    return Pipeline(nodes=nodes, stages=tuple(stages), microbatches=microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    """Rate of a worker, which takes 1 / rate of the profile's time."""

    worker: WorkerId
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(
                f"rate of {self.worker}: {self.rate} is no share of the profiled speed; give one "
                "above 0 and below 1"
            )


def slow_workers(rates: Mapping[WorkerId, float], among: Iterable[WorkerId]) -> Sequence[WorkerId]:
    """List those of the workers `among` that are slower than profiled, sorted."""
    wanted = set(among)
    return sorted(worker for worker, rate in rates.items() if rate != 1 and worker in wanted)


def check_rates(rates: Sequence[WorkerRate], workers: Iterable[WorkerId]) -> None:
    """Raise ValueError unless the rates are sorted, one per worker, of some of `workers`."""
    for before, after in pairwise(rates):
        if after.worker <= before.worker:
            raise ValueError(
                f"rates must be sorted, each worker once: {after.worker} after {before.worker}"
            )
    if rates and (others := {one.worker for one in rates}.difference(workers)):
        raise ValueError(f"rate of {min(others)}: it is no worker of the plan")


class _Times(TypedDict, total=False):
    """Fields of a plan beside its holds and routes."""

    generation: Generation
    schedule: Schedule
    listing: Listing | None
    rates: tuple[WorkerRate, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one generation: who holds which layer and computes which micro-batches.

    The routes take the micro-batches of the global batch in order, so that each is in exactly one
    of them. Ranks are positions in `workers`.
    """

    generation: Generation
    holds: tuple[Hold, ...]
    routes: tuple[Route, ...]
    #: Order of compute on workers that are in one hop only.
    schedule: Schedule = "1f1b"
    #: Input for the order on all others; None: there are none.
    listing: Listing | None = None
    #: Rates of workers slower than profiled, sorted; the listing includes them.
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
        self._check_times()

    def _check_times(self) -> None:
        check_rates(self.rates, self.workers if self.rates else ())
        if self.listing is not None:
            lengths = [len(hops) for hops in self.listing.hops]
            if lengths != [len(route.hops) for route in self.routes]:
                raise ValueError("the listing's hops are not those of the routes")
            if len(self.listing.room) != len(self.workers):
                raise ValueError("the listing's room is not that of the workers")

    def having(self, **times: Unpack[_Times]) -> "Plan":
        """Return the plan with these values and its own holds and routes. Checks and cached values
        of these are not repeated: they take milliseconds for a thousand nodes. Raises
        ValueError."""
        made = object.__new__(Plan)
        # One `update`, which is atomic: another thread may fill this plan's caches meanwhile.
        vars(made).update(vars(self), **times)
        for name in _OF_TIMES:
            vars(made).pop(name, None)
        made._check_times()
        return made

    @classmethod
    def of_pipelines(
        cls,
        pipelines: Iterable[Pipeline],
        *,
        generation: Generation,
        schedule: Schedule = "1f1b",
    ) -> "Plan":
        """Build a plan with one route for each pipeline, through all of its stages. Raises
        ValueError."""
        given = tuple(pipelines)
        nodes = [node for pipeline in given for node in pipeline.nodes]
        if len(set(nodes)) != len(nodes):
            raise ValueError(f"a node is in two pipelines: {sorted(nodes)}")
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

    @cached_property
    def shares(self) -> tuple[range, ...]:
        """The micro-batches of each route."""
        ends = accumulate((route.microbatches for route in self.routes), initial=0)
        return tuple(range(first, stop) for first, stop in pairwise(ends))

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The routes as pipelines. A plan made of templates gets its own pipelines back."""
        holds = {(h.first_layer, h.last_layer, h.workers): h for h in self.holds}
        pipelines = []
        for route in self.routes:
            stages = tuple(
                holds.get((hop.first_layer, hop.last_layer, hop.workers))
                or Hold(first_layer=hop.first_layer, last_layer=hop.last_layer, workers=hop.workers)
                for hop in route.hops
            )
            nodes = dict.fromkeys(stage.workers[0].node for stage in stages)
            pipelines.append(
                Pipeline(nodes=tuple(nodes), stages=stages, microbatches=route.microbatches)
            )
        return tuple(pipelines)

    @cached_property
    def nodes(self) -> tuple[NodeName, ...]:
        return tuple(sorted({hold.workers[0].node for hold in self.holds}))

    @cached_property
    def workers(self) -> tuple[WorkerId, ...]:
        """Workers of the plan, in rank order (sorted)."""
        return tuple(sorted({worker for hold in self.holds for worker in hold.workers}))

    @cached_property
    def shards(self) -> ShardTable:
        """Shards that each worker holds: worker p of d of a hold has the p-th d-th of each of its
        layers' state. Equal sets are one object."""
        found: dict[WorkerId, frozenset[Shard]] = {}
        for hold in self.holds:
            parts = len(hold.workers)
            for part, worker in enumerate(hold.workers):
                own = _shards(hold.first_layer, hold.last_layer, part, parts)
                found[worker] = found[worker] | own if worker in found else own
        return MappingProxyType(found)

    @cached_property
    def held(self) -> Mapping[WorkerId, tuple[int, ...]]:
        """The layers that each worker holds, or has a part of; sorted."""
        found: dict[WorkerId, tuple[int, ...]] = {}
        for hold in self.holds:
            for worker in hold.workers:
                own = tuple(hold.layers)
                found[worker] = tuple(sorted(found[worker] + own)) if worker in found else own
        return MappingProxyType(found)

    @cached_property
    def shadows(self) -> Mapping[WorkerId, tuple[int, ...]]:
        """The layers that workers hold and do not run; sorted, without workers that have none."""
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
        return MappingProxyType(found)

    @cached_property
    def meeting_routes(self) -> tuple[int, ...]:
        """Positions of the routes that meet a worker twice, or share a worker with another
        route."""
        met: dict[WorkerId, int] = {}
        for route in self.routes:
            for hop in route.hops:
                for worker in hop.workers:
                    met[worker] = met.get(worker, 0) + 1
        return tuple(
            position
            for position, route in enumerate(self.routes)
            if any(met[worker] > 1 for hop in route.hops for worker in hop.workers)
        )

    def layer_nodes(self) -> Sequence[frozenset[NodeName]]:
        """Return the nodes that hold each layer; each of them has all of it."""
        return self._layer_nodes

    @cached_property
    def _layer_nodes(self) -> Sequence[frozenset[NodeName]]:
        runs: dict[range, set[NodeName]] = {}
        for hold in self.holds:
            runs.setdefault(hold.layers, set()).add(hold.workers[0].node)
        cuts = sorted({0, self.layer_count, *(end for r in runs for end in (r.start, r.stop))})
        by_layer: list[frozenset[NodeName]] = []
        for first, stop in pairwise(cuts):
            own = frozenset().union(*(nodes for run, nodes in runs.items() if first in run))
            by_layer += [own] * (stop - first)
        return tuple(by_layer)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __hash__(self) -> int:
        """Return the hash, computed once: for a thousand nodes it takes milliseconds, and every
        cache of plans asks for it."""
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: hashes differ between processes, and proxies do not pickle."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def _rates(self) -> Mapping[WorkerId, float]:
        return {one.worker: one.rate for one in self.rates}

    def rate(self, workers: Iterable[WorkerId]) -> float:
        """Return the rate at which these workers compute in step: that of the slowest one."""
        if not self.rates:
            return 1.0
        return min(self._rates.get(worker, 1.0) for worker in workers)

    def with_rates(self, rates: Mapping[WorkerId, float]) -> "Plan":
        """Return the plan with these rates of its workers, and the profiled rate for those not
        named. Rates of other workers are ignored. It has no listing, since a listing includes
        rates."""
        slow = slow_workers(rates, self.workers)
        own = tuple(WorkerRate(worker=worker, rate=rates[worker]) for worker in slow)
        return self.having(rates=own, listing=None)

    def hold_of(self, worker: WorkerId, layer: int) -> Hold:
        """Return the hold by which `worker` holds `layer`. Raises ValueError where it does not."""
        for hold in self.holds:
            if layer in hold.layers and worker in hold.workers:
                return hold
        raise ValueError(
            f"worker {worker} does not hold layer {layer} in generation {self.generation}"
        )

    def owners(self, layer: int) -> tuple[WorkerId, ...]:
        """Return the workers that hold `layer`, sorted."""
        return tuple(sorted(w for hold in self.holds if layer in hold.layers for w in hold.workers))


#: Cached values of a plan that follow from more than its holds and routes.
_OF_TIMES = frozenset({"_hash", "_rates"})

# Plans come from agents, too: no check may iterate over all layers that a plan claims to have.


def _check_once(holds: Iterable[Hold]) -> None:
    workers = [worker for hold in holds for worker in hold.workers]
    if len(set(workers)) == len(workers):
        return
    held: dict[WorkerId, list[range]] = {}
    for hold in holds:
        for worker in hold.workers:
            held.setdefault(worker, []).append(hold.layers)
    for worker, own in held.items():
        for before, after in pairwise(sorted(own, key=_start)):
            if after.start < before.stop:
                raise ValueError(f"{worker} holds layer {after.start} twice")


def _check_held(routes: Iterable[Route], holds: Iterable[Hold]) -> None:
    """Check that each hop's layers are held by its workers, together and in the same order."""
    whole = {(hold.workers, hold.first_layer, hold.last_layer) for hold in holds}
    hops = [
        hop
        for route in routes
        for hop in route.hops
        if (hop.workers, hop.first_layer, hop.last_layer) not in whole
    ]
    if not hops:
        return
    held: dict[tuple[WorkerId, ...], list[range]] = {}
    for hold in holds:
        held.setdefault(hold.workers, []).append(hold.layers)
    for own in held.values():
        own.sort(key=_start)
    for hop in hops:
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


def is_of_pipelines(plan: Plan) -> bool:
    """Return whether each worker is in one route only, with all that it holds."""
    try:
        return Plan.of_pipelines(
            plan.pipelines, generation=plan.generation, schedule=plan.schedule
        ) == plan.having(listing=None, rates=())
    except ValueError:
        return False


def pipelines_within(plan: Plan) -> Plan:
    """Return the plan itself if it is made of pipelines. Else return its first routes that have no
    node in common, with all micro-batches in the same proportions."""
    if is_of_pipelines(plan):
        return plan
    taken: list[Pipeline] = []
    nodes: set[NodeName] = set()
    for pipeline in plan.pipelines:
        if nodes.isdisjoint(pipeline.nodes):
            taken.append(pipeline)
            nodes.update(pipeline.nodes)
    shares = _in_proportion([pipeline.microbatches for pipeline in taken], plan.microbatches)
    return Plan.of_pipelines(
        (replace(one, microbatches=share) for one, share in zip(taken, shares, strict=True)),
        generation=plan.generation,
        schedule=plan.schedule,
    )


def _in_proportion(parts: list[int], total: int) -> list[int]:
    """Split `total` in proportion to `parts`, each rounded down or up; of equal remainders the
    first gets more."""
    whole = sum(parts)
    shares = [part * total // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda k: -(parts[k] * total % whole))
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares

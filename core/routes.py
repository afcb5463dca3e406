"""Parts of plans: layers that workers hold, and the hops of micro-batches through them.

They are Structs, since a plan has thousands: making, hashing and comparing them is quick.
"""

from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from itertools import pairwise

import msgspec

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.units import runs


class _Layers(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Contiguous layers on some workers of one node."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    workers: tuple[WorkerId, ...]

    def __post_init__(self) -> None:
        kind, workers = type(self).__name__.lower(), self.workers
        if not workers:
            raise ValueError(f"a {kind} needs at least one worker")
        if len(workers) > 1 and len(set(workers)) < len(workers):
            raise ValueError(f"a {kind}'s workers must be different ones: {workers}")
        if len(workers) > 1 and len({w.node for w in workers}) > 1:
            raise ValueError(f"a {kind}'s workers must be of one node: {workers}")
        if self.first_layer < 0:
            raise ValueError(f"first_layer: {self.first_layer} is below 0")
        if self.last_layer < self.first_layer:
            raise ValueError(f"last_layer: {self.last_layer} is below {self.first_layer}")

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)


class Hop(_Layers, frozen=True, kw_only=True, gc=False):
    """Layers that `workers` compute for the micro-batches of a route: the i-th of d workers
    computes the i-th d-th of each micro-batch's rows."""


class Hold(_Layers, frozen=True, kw_only=True, gc=False):
    """Layers that `workers` hold: the p-th of d workers holds the p-th d-th of each
    layer's state.
    """

    #: With several workers: each keeps gathered weights and whole layers' gradients for a step,
    #: since its memory allows it (`oobleck.core.sharing`).
    resident: bool = False


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Hops that carry some micro-batches through the whole model."""

    #: Ordered by layers, from the first one of the model to the last one.
    hops: tuple[Hop, ...]
    #: Number of micro-batches.
    microbatches: int

    def __post_init__(self) -> None:
        if not self.hops:
            raise ValueError("a route needs at least one hop")
        if self.microbatches < 1:
            raise ValueError("a route needs at least one micro-batch")
        if self.hops[0].first_layer != 0:
            raise ValueError(f"a route begins at layer {self.hops[0].first_layer}, not at 0")
        for before, after in pairwise(self.hops):
            if after.first_layer != before.last_layer + 1:
                raise ValueError(
                    f"a route goes from layer {before.last_layer} on to {after.first_layer}"
                )
            if not set(before.workers).isdisjoint(after.workers):
                raise ValueError(
                    f"two hops in a row, to layers {before.last_layer} and {after.last_layer}, are "
                    "on the same worker; one hop must have all that a worker computes in a row"
                )


class Shard(msgspec.Struct, frozen=True, order=True, gc=False):
    """Part `part` of `parts` equal ones of a layer's flat state (see `cut`)."""

    layer: int
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise ValueError(f"part {self.part} of {self.parts}; parts count from 0")

    @property
    def start(self) -> Fraction:
        return Fraction(self.part, self.parts)

    @property
    def stop(self) -> Fraction:
        return Fraction(self.part + 1, self.parts)


#: Shards that each worker holds.
ShardTable = Mapping[WorkerId, frozenset[Shard]]


class LayerLost(PlanInfeasible):
    """Loss of layers that no live worker holds: only a checkpoint or a returning node can help."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(layers))
        named = (
            f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs(self.layers)
        )
        super().__init__(f"no live worker holds the state of layer {', '.join(named)}")


def require_holders(held: ShardTable, layer_count: int) -> None:
    """Raise LayerLost where a layer, or a part of one, has no holder."""
    spans: dict[int, set[Shard]] = {layer: set() for layer in range(layer_count)}
    for shards in set(held.values()):
        for shard in shards:
            spans[shard.layer].add(shard)
    if lost := {layer for layer, shards in spans.items() if not _cover(shards)}:
        raise LayerLost(lost)


def _cover(shards: Collection[Shard]) -> bool:
    """Return whether the shards make up the whole layer."""
    if any(shard.parts == 1 for shard in shards):
        return True
    reached = Fraction(0)
    for shard in sorted(shards, key=lambda shard: shard.start):
        if shard.start > reached:
            return False
        reached = max(reached, shard.stop)
    return reached == 1


class HopTicks(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Cost of one micro-batch at one hop, in whole ticks and bytes, with the workers' rates."""

    forward: int
    #: The two parts of a backward.
    backward_input: int
    backward_weight: int
    #: Time of a message to or from the hop after, which keeps no worker from computing.
    message: int
    #: Bytes that each worker keeps from the begin of the forward to the end of the backward.
    kept_bytes: int
    #: The part that is kept from the end of `BackwardInput` to that of `BackwardWeight`.
    deferred_bytes: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward_input, self.backward_weight, self.message) < 0:
            raise ValueError(f"ticks must not be negative: {self}")
        if not 0 <= self.deferred_bytes <= self.kept_bytes:
            raise ValueError(f"deferred bytes must be a part of the kept ones: {self}")


class Listing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Costs of the hops of a plan, and the free memory of its workers."""

    #: By route and hop.
    hops: tuple[tuple[HopTicks, ...], ...]
    #: Bytes for kept activations, by rank.
    room: tuple[int, ...]
    #: True if the backwards of all hops but a route's first are in two parts.
    split: bool

    def __post_init__(self) -> None:
        if any(room < 0 for room in self.room):
            raise ValueError(f"room must not be negative: {min(self.room)}")

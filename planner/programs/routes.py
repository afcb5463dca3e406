"""Parts of plans: layers that workers hold, and the hops of micro-batches through them."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from oobleck.planner.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop(_Layers):
    """Layers that `workers` compute for the micro-batches of a route: the i-th of d workers the
    i-th d-th of each micro-batch's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(_Layers):
    """Layers that `workers` hold: the p-th of d workers the p-th d-th of each layer's state."""

    #: Of several workers: each keeps the weights that it has gathered, and its gradients of the
    #: whole layers, for a step, since there is room (`oobleck.planner.profile.sharing`).
    resident: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The hops that carry some micro-batches through the whole model."""

    #: By layers, from the first one of the model to the last one.
    hops: tuple[Hop, ...]
    #: How many.
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
                    "on the same worker; one hop must have what a worker computes in a row"
                )


def runs(layers: Iterable[int]) -> list[list[int]]:
    """Sorted, those in a row together."""
    found: list[list[int]] = []
    for layer in sorted(layers):
        if found and found[-1][-1] == layer - 1:
            found[-1].append(layer)
        else:
            found.append([layer])
    return found

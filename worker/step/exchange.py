"""Stages that several workers of a node share: each has a share of weights and some of the rows.

The weights of a layer are gathered from all shares. Then the gradients, which each worker has for
its own rows, are summed into the shares. This is fully sharded data parallelism, as ZeRO-3 of
Rajbhandari et al., 2020. A resident stage does both once per step, any other for each micro-batch.
While a layer is computed, the weights of the next one and the gradients of the previous one travel.

All workers of the stage act alike in the same order. Their decisions depend only on common inputs:
the programs, which are compiled alike, and the micro-batches of each gradient. A worker without a
row of a micro-batch takes part too. Must not know what is computed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from oobleck.core.routes import Shard
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state.layer_state import LayerState
from oobleck.worker.state.layout import point_gradients, point_parameters
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.transport import Pending, Transport

#: Tags of a layer's messages, beyond those of all others: weights and gradients, each of the tied
#: part and of the own one.
_FIRST_TAG = 1 << 29
_KINDS = 4
_GATHER, _REDUCE = 0, 2

#: Layer, and the micro-batches that its gradient in the state now has and lacked before.
Added = tuple[int, Sequence[int]]


class Exchange:
    """Communication of a stage around the computation of a layer: none in this base class, which
    serves a stage on one worker."""

    #: True if several workers share the stage.
    shared = False

    def begin(self, due: Mapping[int, int]) -> None:
        """Begin a step in which each layer's gradient gets so many micro-batches."""

    def computing(
        self, layer: int, *, gradients: bool, following: int | None = None
    ) -> AbstractContextManager[None]:
        """Give the layer's module its weights inside the block and, if `gradients`, have it take
        gradients. `following`: the layer that is computed next; None: unknown."""
        return nullcontext()

    def take_gradients(self, layer: int) -> None:
        """Have the layer's module take gradients, without weights."""

    def add(self, layer: int, microbatch: int) -> Sequence[Added]:
        """Add the layer's gradients of `microbatch`, which are complete. Return the layers and
        micro-batches that are in the state at once. If there are none, `finish` must be called
        before the next layer's are added, and at the end of a pass."""
        return ((layer, (microbatch,)),)

    def finish(self) -> Sequence[Added]:
        """Wait for the sum that is under way, if any; return what is then in the state."""
        return ()

    @property
    def on_its_way(self) -> Sequence[int]:
        """Layers whose sums are under way."""
        return ()

    def end(self) -> None:
        """Wait until no message of the step is under way; call it before the update."""


class StageExchange(Exchange):
    """Communication of a stage on several workers. All methods raise TransportError when a worker
    is lost."""

    shared = True

    def __init__(
        self,
        state: ModelState,
        layers: Iterable[int],
        transport: Transport,
        ranks: Sequence[int],
        *,
        sums: torch.dtype,
        resident: Collection[int],
        timeline: Timeline,
        stopwatch: Stopwatch,
    ) -> None:
        """Make the exchange.

        `ranks`: workers that hold `layers` together, by their part; `sums`: type in which gradients
        are sent; `resident`: the layers that are; `stopwatch`: paused during waits for the others.
        """
        self._layers = {
            layer: _SharedLayer(state.layers[layer], transport, ranks, sums) for layer in layers
        }
        self._resident = resident
        self._timeline = timeline
        self._stopwatch = stopwatch
        self._due: dict[int, int] = {}
        #: By layer: micro-batches whose gradients this worker has of its own rows only.
        self._apart: defaultdict[int, list[int]] = defaultdict(list)
        #: Layer whose gradients are on their way into the shares.
        self._reducing: int | None = None

    def begin(self, due: Mapping[int, int]) -> None:
        self._due = dict(due)
        self._apart.clear()
        for layer, shared in self._layers.items():
            shared.release()
            if layer in self._resident:
                shared.start_gathering()

    @contextmanager
    def computing(
        self, layer: int, *, gradients: bool, following: int | None = None
    ) -> Iterator[None]:
        shared = self._layers[layer]
        with self._timeline.span("gather", layer), self._stopwatch.paused():
            shared.start_gathering()
            shared.finish_gathering()
            if following is not None:
                self._layers[following].start_gathering()
        if gradients:
            shared.take_gradients()
        yield
        if layer not in self._resident:
            shared.release()

    def take_gradients(self, layer: int) -> None:
        self._layers[layer].take_gradients()

    def add(self, layer: int, microbatch: int) -> Sequence[Added]:
        assert self._reducing is None, "one layer's memory at a time"
        self._due[layer] -= 1
        self._apart[layer].append(microbatch)
        if layer not in self._resident or not self._due[layer]:
            with self._stopwatch.paused():
                self._layers[layer].start_reducing()
            self._reducing = layer
        return ()

    def finish(self) -> Sequence[Added]:
        if self._reducing is None:
            return ()
        layer = self._reducing
        with self._timeline.span("reduce", layer), self._stopwatch.paused():
            self._layers[layer].finish_reducing()
        self._reducing = None
        return ((layer, self._apart.pop(layer)),)

    @property
    def on_its_way(self) -> Sequence[int]:
        return () if self._reducing is None else (self._reducing,)

    def end(self) -> None:
        for shared in self._layers.values():
            shared.finish_gathering()


class _SharedLayer:
    """Layer that several workers share, with the whole layer's weights and gradients while in
    memory.
    """

    def __init__(
        self, state: LayerState, transport: Transport, ranks: Sequence[int], sums: torch.dtype
    ) -> None:
        shard, flat = state.shard, state.layout
        self._state = state
        self._transport = transport
        self._part = shard.part
        self._ranks = tuple(ranks)
        self._sums = sums
        #: By part: numbers of the tied part and of the own one.
        self._cuts = [
            flat.shard(Shard(shard.layer, part, shard.parts)) for part in range(len(ranks))
        ]
        #: The tied part and the own one, if the layer has them.
        self._kinds = [kind for kind in (0, 1) if any(len(cut[kind]) for cut in self._cuts)]
        self._tag = _FIRST_TAG + shard.layer * _KINDS
        own = state.computed()
        weights = torch.empty(flat.size, dtype=own.dtype, device=own.device)
        self._memory = weights.untyped_storage()
        self._bytes = self._memory.nbytes()
        point_parameters(state.module, flat, weights)
        # Autograd keeps views of these weights from a forward. For the backward the memory is
        # allocated and filled with the same numbers again. Write through `.data`, which has a
        # version counter of its own, so that autograd does not see a change.
        self._weights = weights.data
        self._gradient: Tensor | None = None
        #: The parameters' views of `_gradient`.
        self._views: tuple[Tensor, ...] = ()
        self._gathered = False
        self._gathering: list[Pending] = []
        self._reducing: list[Pending] = []
        #: While gradients are under way: numbers of the own share, and the summands of each part.
        self._summands: list[tuple[range, list[Tensor]]] = []
        self._memory.resize_(0)

    def start_gathering(self) -> None:
        if self._gathered:
            return
        self._gathered = True
        self._memory.resize_(self._bytes)
        state, own = self._state, self._cuts[self._part]
        weights = state.computed()
        for numbers in own:
            self._weights[numbers.start : numbers.stop] = weights[state.columns(numbers)]
        for kind in self._kinds:
            share = weights[state.columns(own[kind])]
            sent = self._but_own([share] * len(self._ranks))
            shares = [self._weights[cut[kind].start : cut[kind].stop] for cut in self._cuts]
            exchanged = self._exchange(sent, self._but_own(shares), _GATHER + kind)
            self._gathering.append(exchanged)

    def finish_gathering(self) -> None:
        while self._gathering:
            self._gathering.pop().wait()

    def release(self) -> None:
        """Free the weights; they are gathered anew."""
        self.finish_gathering()
        self._memory.resize_(0)
        self._gathered = False

    def take_gradients(self) -> None:
        """Have a backward add to the gradients of the whole layer."""
        if self._gradient is None:
            state = self._state
            self._gradient = torch.zeros_like(self._weights, dtype=state.gradient.dtype)
            self._views = point_gradients(state.module, state.layout, self._gradient)

    def start_reducing(self) -> None:
        """Send the other workers their shares of the whole layer's gradients; the next backward
        makes new ones."""
        self.take_gradients()
        gradient = self._gradient
        assert gradient is not None, "it was taken"
        own = self._cuts[self._part]
        for kind in self._kinds:
            shares = [gradient[cut[kind].start : cut[kind].stop] for cut in self._cuts]
            mine = shares[self._part]
            rooms = self._but_own([mine] * len(shares))
            received = [torch.empty_like(room, dtype=self._sums) for room in rooms]
            sent = [share.to(self._sums) for share in self._but_own(shares)]
            self._reducing.append(self._exchange(sent, received, _REDUCE + kind))
            summands = [mine if part == self._part else each for part, each in enumerate(received)]
            self._summands.append((own[kind], summands))
        self._state.noted.update(n for n, view in enumerate(self._views) if view._version)
        for parameter in self._state.module.parameters():
            parameter.grad = None
        self._gradient, self._views = None, ()

    def finish_reducing(self) -> None:
        """Add all workers' parts to the own share, in the same order everywhere, and free their
        memory.
        """
        while self._reducing:
            self._reducing.pop().wait()
        for numbers, summands in self._summands:
            gradient = self._state.gradient[self._state.columns(numbers)]
            for values in summands:
                gradient += values
        self._summands = []

    def _but_own(self, by_part: Sequence[Tensor]) -> list[Tensor]:
        """Return the same tensors with the own part empty."""
        return [each[:0] if part == self._part else each for part, each in enumerate(by_part)]

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], kind: int) -> Pending:
        return self._transport.exchange(sent, received, self._ranks, self._tag + kind)

"""Running a stage: forward and backward of contiguous layers, micro-batch by micro-batch.

Owns the micro-batches under way, and notes in the state which ones a layer's gradient has. A
segment is what autograd runs in one go: a layer, or several in a row where no gradient is wanted
before the last. With recomputation a layer keeps its input alone and is computed again in its
backward. Any order of micro-batches is right. Knows nothing of peers or steps.
"""

from collections import deque
from collections.abc import Callable, Container
from functools import partial

import torch
from torch import Tensor

from oobleck.planner.job.spec import JobSpec
from oobleck.worker.data.objective import loss
from oobleck.worker.models.linear import DeferredGradients, deferring
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.model_state import ModelState, state_dtype
from oobleck.worker.step.exchange import Exchange

#: Is told each layer whose gradient has the micro-batch now.
OnLayer = Callable[[int], object]


def activation_shape(job: JobSpec) -> tuple[int, int, int]:
    """Of what passes between layers, forwards and backwards, for one micro-batch."""
    return (job.training.microbatch, job.model.sequence_length, job.model.hidden)


class _Segment:
    """A layer of a micro-batch, or several in a row, between forward and backward."""

    def __init__(self, *, leaf: Tensor | None, adds: bool, idle: bool) -> None:
        """`leaf`: what the gradient is wanted of, the input; None where nobody wants it. `adds`:
        whether the layers' gradients are to get the micro-batch's. `idle`: this worker has no row
        of it."""
        self._leaf = leaf
        self._idle = idle
        self.adds = adds
        self.layers: list[int] = []
        #: Where its backward is split: each layer's weight gradients, which are left for later.
        self.deferred: list[tuple[int, DeferredGradients]] = []
        #: With its graph, or what makes it with its graph.
        self._output: Tensor | Callable[[], Tensor] | None = None

    def append(
        self,
        layer: int,
        output: Tensor | Callable[[], Tensor],
        deferred: DeferredGradients | None,
    ) -> None:
        self.layers.append(layer)
        self._output = output
        if deferred is not None:
            self.deferred.append((layer, deferred))

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """From the gradient of the output to that of the input, adding the weights' or not."""
        leaf, output = self._leaf, self._output
        if self._idle or (leaf is None and not self.adds):
            return None
        assert output is not None, "a segment has a layer"
        if not isinstance(output, Tensor):
            output = output()
        if self.adds or leaf is None:
            torch.autograd.backward(output, gradient)
            return None if leaf is None else leaf.grad
        return torch.autograd.grad(output, leaf, gradient)[0]


class StageRunner:
    """Contiguous layers on this worker, for the micro-batches that pass them in one go."""

    def __init__(
        self,
        state: ModelState,
        layers: range,
        job: JobSpec,
        device: torch.device,
        timeline: Timeline | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """`exchange`: with the other workers of the stage, if there are any."""
        self._timeline = timeline or Timeline()
        self._exchange = exchange or Exchange()
        self._state = state
        self._layers = layers
        self._job = job
        self.device = device
        #: By micro-batch, lowest layer first.
        self._in_flight: dict[int, list[_Segment]] = {}
        #: Micro-batches between the two parts of their backward: layers, highest first.
        self._deferred: dict[int, deque[tuple[int, DeferredGradients]]] = {}

    @property
    def first(self) -> bool:
        """Whether it takes tokens."""
        return self._layers[0] == 0

    @property
    def last(self) -> bool:
        """Whether it yields the loss."""
        return self._layers[-1] == self._job.model.layer_count - 1

    @property
    def activation_dtype(self) -> torch.dtype:
        return state_dtype(self._job.training.precision)

    def forward(
        self,
        microbatch: int,
        x: Tensor,
        rows: RowKeys,
        targets: Tensor | None = None,
        *,
        split: bool = False,
        adding: Container[int] | None = None,
        lowest: int = 0,
        by_layer: bool = True,
    ) -> Tensor:
        """The stage's output for `x`; on the last stage, which needs `targets`, the loss: these
        rows' part of the micro-batch's mean.

        `x` is int64 tokens (b, T) on the first stage and the previous stage's output elsewhere;
        b may be less than a micro-batch, or 0, where several workers share the stage. Tokens and
        targets may still lie in host memory.
        The result is cut off from autograd: it may be sent as it is.

        `split`: its backward will come as `backward_input` and `backward_weight`.
        `adding`: the layers whose gradients get the micro-batch's; None: all.
        `lowest`: the lowest of those in the whole model; below it there is no backward.
        `by_layer`: a layer is told of right after its own backward. Otherwise all are after that of
        the stage, which saves what autograd spends between layers.
        """
        if self.last and targets is None:
            raise ValueError("the last stage needs targets")
        x = x.to(self.device)
        targets = None if targets is None else targets.to(self.device)
        segments: list[_Segment] = []
        recompute = self._job.training.recompute == "layer"
        idle = not rows.positions
        by_layer = by_layer or recompute or self._exchange.shared
        for layer in self._layers:
            wanted = layer >= lowest
            adds = wanted and (adding is None or layer in adding)
            deferred = DeferredGradients() if split and adds else None
            before = segments[-1] if segments and not by_layer else None
            joins = before is not None and before.adds == adds
            leaf = None
            if layer > lowest and not joins and not idle:
                leaf = x.detach().requires_grad_()
            graph = wanted and not recompute
            run = partial(self._run, layer, x if leaf is None else leaf, rows, targets, deferred)
            with (
                self._timeline.span("layer", layer),
                torch.set_grad_enabled(graph),
                self._exchange.computing(layer, gradients=False),
            ):
                x = self._no_rows(layer, x) if idle else run()
            if not wanted:
                continue
            if before is None or not joins:
                segments.append(_Segment(leaf=leaf, adds=adds, idle=idle))
            segments[-1].append(layer, run if recompute else x, deferred)
        if segments:
            self._in_flight[microbatch] = segments
        return x.detach()

    def _run(
        self,
        layer: int,
        x: Tensor,
        rows: RowKeys,
        targets: Tensor | None,
        deferred: DeferredGradients | None,
    ) -> Tensor:
        """The layer's output; again the same, bit for bit: what is random follows from `rows`."""
        precision = self._job.training.precision
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"),
            deferring(deferred),
        ):
            x = self._state.module(layer)(x, rows)
            if layer != self._layers[-1]:
                return x
            return (x if targets is None else self._loss(x, targets)).to(self.activation_dtype)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        rows, whole = len(targets), self._job.training.microbatch
        mean = loss(logits, targets)
        return mean if rows == whole else mean * (rows / whole)

    def _no_rows(self, layer: int, x: Tensor) -> Tensor:
        """The layer's output where this worker has no row of the micro-batch."""
        final = self.last and layer == self._layers[-1]
        shape = () if final else (0, *activation_shape(self._job)[1:])
        return torch.zeros(shape, dtype=self.activation_dtype, device=x.device)

    def backward(
        self,
        microbatch: int,
        gradient: Tensor | None = None,
        on_layer: OnLayer = lambda layer: None,
    ) -> Tensor | None:
        """Add the micro-batch's gradients to the layers', telling `on_layer` of each layer at once,
        and return that of the stage's input.

        `gradient` is that of the output, None on the last stage: the loss itself. None is returned
        where nobody wants it, as on the first stage.
        """
        segments = self._in_flight.pop(microbatch)
        assert not any(s.deferred for s in segments), (
            "its forward was told that the backward would be split"
        )
        while segments:
            segment = segments.pop()
            gradient = self._backward(segment, gradient)
            # Autograd has added to all of them: that is noted before anything else can fail.
            added = segment.layers[::-1] if segment.adds else []
            for layer in added:
                self._add(layer, microbatch)
            for layer in added:
                on_layer(layer)
        return gradient

    def backward_input(self, microbatch: int, gradient: Tensor | None = None) -> Tensor | None:
        """As `backward`, but most of the weights' gradients are left to `backward_weight`.

        Until then the inputs of the linear layers and the gradients of their outputs are kept.
        """
        segments = self._in_flight.pop(microbatch)
        assert all(s.deferred for s in segments if s.adds), (
            "its forward was not told that the backward is split"
        )
        due = self._deferred[microbatch] = deque()
        while segments:
            segment = segments.pop()
            gradient = self._backward(segment, gradient)
            due.extend(reversed(segment.deferred))
        return gradient

    def _backward(self, segment: _Segment, gradient: Tensor | None) -> Tensor | None:
        first, last = segment.layers[0], segment.layers[-1]
        name = "layer" if first == last else f"layers {first} to"
        with (
            self._timeline.span(name, last),
            # Where there is an exchange, a segment is one layer.
            self._exchange.computing(first, gradients=segment.adds),
        ):
            return segment.backward(gradient)

    def _add(self, layer: int, microbatch: int) -> None:
        for complete in self._exchange.add(layer, microbatch):
            self._state.layers[layer].added.add(complete)

    def settle(self) -> None:
        """Leave a step in the middle: drop what is in flight, and add what was left for later, so
        that no layer's gradient has a part of a micro-batch. Where several workers share the layers
        all of them would have to add it: there it is dropped, and such a layer's gradient, which
        may have the other part already, does not count."""
        self._in_flight.clear()
        if self._exchange.shared:
            for due in self._deferred.values():
                for layer, _ in due:
                    self._state.layers[layer].added.clear()
            self._deferred.clear()
        for microbatch in list(self._deferred):
            self.backward_weight(microbatch)

    def backward_weight(self, microbatch: int, on_layer: OnLayer = lambda layer: None) -> None:
        """Add what `backward_input` left out, telling `on_layer` of each layer at once, and keep
        nothing of the micro-batch any more. What `on_layer` raises ends it after that layer."""
        due = self._deferred[microbatch]
        while due:
            layer, deferred = due[0]
            self._exchange.take_gradients(layer)
            deferred.add()
            self._add(layer, microbatch)
            # Only now: where the exchange fails, `settle` must find the layer.
            due.popleft()
            on_layer(layer)
        del self._deferred[microbatch]

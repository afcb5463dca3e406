"""Running of a stage: forward and backward of contiguous layers, micro-batch by micro-batch.

Owns the micro-batches under way, and records in the state which ones a layer's gradient has.
Autograd runs a segment at once: a layer, or several consecutive ones where no gradient is wanted
before the last. With recomputation a layer keeps only its input and is computed again in its
backward. Micro-batches may come in any order. Must not know peers or steps.
"""

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.model import at_step
from oobleck.worker.data.objective import loss
from oobleck.worker.models.base import DeferredGradients, Layer, WeightGradients, adding
from oobleck.worker.models.tree import Tree, map_tensors
from oobleck.worker.runtime.code import running
from oobleck.worker.runtime.device import has_queue
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.precision import autocasts, stream_dtype
from oobleck.worker.step.exchange import Added, Exchange
from oobleck.worker.step.mailbox import Wire, wire

# ---- Segment of a micro-batch that autograd runs at once: a layer, or several consecutive ones.
#
# Owns the step from the gradients of a segment's output to those of its input.


#: Gradients of the tensors at a boundary that have one; None: it does not depend on that tensor.
Gradients = Sequence[Tensor | None]


class Segment:
    """Layer of a micro-batch, or several consecutive ones, between forward and backward."""

    def __init__(
        self, *, leaves: list[Tensor] | None, adds: bool, rows: int, weight: float
    ) -> None:
        """Make a segment.

        `leaves`: tensors of the input that need gradients; None if no gradient of the input is
        needed. `adds`: whether the layers' gradients get the micro-batch's. `rows`: this worker's
        rows of it. `weight`: weight of its loss in the step's, of which gradients are taken.
        """
        self._leaves = leaves
        self._weight = weight
        self.adds = adds
        self.rows = rows
        self.layers: list[int] = []
        #: With a split backward: each layer's deferred weight gradients.
        self.deferred: list[tuple[int, DeferredGradients]] = []
        #: Output with its graph, or a function that makes it.
        self._output: Tree | Callable[[], Tree] | None = None
        #: Wire that the output passes through; None: the output is the loss.
        self._above: Wire | None = None

    def append(
        self,
        layer: int,
        output: Tree | Callable[[], Tree],
        above: Wire | None,
        deferred: DeferredGradients | None,
    ) -> None:
        self.layers.append(layer)
        self._output, self._above = output, above
        if deferred is not None:
            self.deferred.append((layer, deferred))

    def backward(self, gradients: Gradients | None) -> Gradients | None:
        """Compute the gradients of the input from those of the output, None for the loss. Adds the
        weights' gradients where the segment `adds`."""
        leaves, output = self._leaves, self._output
        if not self.rows:
            return None
        if not self.adds and not leaves:
            return leaves
        assert output is not None, "a segment has a layer"
        if callable(output):
            output = output()
        roots, gradients = self._roots(output, gradients)
        if not roots:
            return leaves and [None] * len(leaves)
        if self.adds or not leaves:
            torch.autograd.backward(roots, gradients)
            return leaves and [leaf.grad for leaf in leaves]
        return torch.autograd.grad(roots, leaves, gradients, allow_unused=True)

    def _roots(
        self, output: Tree, gradients: Gradients | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tensors that the backward begins with, and their gradients. A tensor may lack
        a graph here, such as one without a wanted weight before it, from the lowest layer on."""
        if self._above is None:
            assert isinstance(output, Tensor)
            if not output.requires_grad:
                return [], []
            return [output], [torch.full_like(output, self._weight)]
        assert gradients is not None, "the layer above has a backward"
        roots: list[Tensor] = []
        found: list[Tensor | None] = []
        for root, gradient in zip(self._above.with_gradient(output), gradients, strict=True):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                found.append(gradient)
        return roots, found


#: Called with each layer whose gradient has the micro-batch now.
OnLayer = Callable[[int], object]


class StageRunner:
    """Contiguous layers on this worker, for the micro-batches that pass them at once."""

    def __init__(
        self,
        state: ModelState,
        layers: range,
        job: JobSpec,
        device: torch.device,
        timeline: Timeline | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Make the runner. `exchange`: with the other workers of the stage, if there are any."""
        self._timeline = timeline or Timeline()
        self._exchange = exchange or Exchange()
        self._state = state
        self._layers = layers
        self._job = job
        self.device = device
        #: True if the data are its input.
        self.first = layers[0] == 0
        #: True if it yields the loss.
        self.last = layers[-1] == job.model.layer_count - 1
        boundaries = range(max(0, layers[0] - 1), min(layers[-1] + 1, job.model.layer_count - 1))
        #: Conversion between each layer and the next, from the stage's input to its output.
        self._wires = {layer: wire(job, layer) for layer in boundaries}
        #: True for a user's model, whose layers decide the types of their results.
        self._own = not isinstance(job.model, ModelSpec)
        self._autocasts = autocasts(job)
        #: Adds weight gradients whose products are in bf16; None: autograd does.
        self._narrow_products = WeightGradients() if job.training.narrow else None
        #: Type of the values between the layers of a built-in model.
        self.activation_dtype = stream_dtype(job)
        #: By micro-batch, lowest layer first.
        self._in_flight: dict[int, list[Segment]] = {}
        #: Micro-batches between the two parts of their backward: layers, highest first.
        self._deferred: dict[int, deque[tuple[int, DeferredGradients]]] = {}

    def forward(
        self,
        microbatch: int,
        x: Tree,
        rows: RowKeys,
        targets: Tree | None = None,
        *,
        split: bool = False,
        adding: Container[int] | None = None,
        lowest: int = 0,
        by_layer: bool = True,
        metrics: Counter[str] | None = None,
    ) -> Tensor:
        """Return the stage's packed output for `x`.

        The last stage needs `targets` and returns (2,) in float64. These are the sum of its rows'
        losses divided by the micro-batch's row count, and the sum of their weights.

        `x` is the data's input on the first stage, such as int64 tokens (b, T), and the previous
        stage's output elsewhere. Its row count may be less than a micro-batch, or 0, if several
        workers share the stage. Inputs and targets may still be in host memory. The result is
        detached from autograd: it may be sent as it is.

        - `split`: its backward will be called as `backward_input` and `backward_weight`.
        - `adding`: layers whose gradients get the micro-batch's; None: all.
        - `lowest`: the lowest of those in the whole model; below it there is no backward.
        - `by_layer`: report each layer right after its own backward. Otherwise report all after the
          stage's backward, which saves autograd's overhead between layers.
        - `metrics`: on the last stage receives the model's metrics of these rows.
        """
        if self.last and targets is None:
            raise ValueError("the last stage needs targets")
        x = self._take(x)
        targets = None if targets is None else map_tensors(self._moved, targets)
        segments: list[Segment] = []
        recompute = self._job.training.recompute == "layer"
        count = len(rows.positions)
        by_layer = by_layer or recompute or self._exchange.shared
        for layer, following in zip_longest(self._layers, self._layers[1:]):
            wanted = layer >= lowest
            adds = wanted and (adding is None or layer in adding)
            deferred = DeferredGradients() if split and adds else None
            before = segments[-1] if segments and not by_layer else None
            joins = before is not None and before.adds == adds
            leaves = None
            if layer > lowest and not joins and count:
                x, leaves = self._wires[layer - 1].cut(x)
            graph = wanted and not recompute
            gradients = deferred or (self._narrow_products if adds else None)
            run = partial(self._run, layer, x, rows, targets, gradients, metrics)
            with (
                self._timeline.computing("layer", layer),
                torch.set_grad_enabled(graph),
                self._exchange.computing(layer, gradients=False, following=following),
            ):
                if count:
                    x = run()
            if not wanted:
                continue
            if before is None or not joins:
                weight = 1 / self._job.training.microbatches
                segments.append(Segment(leaves=leaves, adds=adds, rows=count, weight=weight))
            above = self._wires.get(layer)
            segments[-1].append(layer, run if recompute else x, above, deferred)
        if segments:
            self._in_flight[microbatch] = segments
        return self._give(x, count)

    def _take(self, x: Tree) -> Tree:
        """Return the input, from the data or from a received message."""
        x = map_tensors(self._moved, x)
        if self.first:
            return x
        assert isinstance(x, Tensor)
        return self._wires[self._layers[0] - 1].unpack(x)

    def _give(self, x: Tree, rows: int) -> Tensor:
        """Return the output packed for sending, detached from autograd."""
        if self.last:
            if not rows:
                return torch.zeros(2, dtype=torch.float64, device=self.device)
            assert isinstance(x, Tensor)
            return x.detach()
        above = self._wires[self._layers[-1]]
        # Without a row no layer was run.
        return above.pack(x, rows, self.device) if rows else above.values.zeros(0, self.device)

    def _moved(self, tensor: Tensor) -> Tensor:
        """Move the tensor to the device. A host tensor goes through pinned memory, so that the copy
        is queued and nothing waits for it."""
        if has_queue(self.device) and not has_queue(tensor.device):
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _run(
        self,
        layer: int,
        x: Tree,
        rows: RowKeys,
        targets: Tree | None,
        gradients: WeightGradients | None,
        metrics: Counter[str] | None,
    ) -> Tree:
        """Return the layer's output. A repeated run gives the same result, bit for bit: all
        randomness follows from `rows`."""
        with (
            torch.autocast(self.device.type, torch.bfloat16) if self._autocasts else nullcontext(),
            adding(gradients),
            at_step(rows.shown_step),
        ):
            module = self._state.module(layer)
            x = module(x, rows)
            # After each layer, so that a result does not depend on where stages end.
            if self._autocasts:
                x = map_tensors(_widened, x)
            elif not self._own:
                assert isinstance(x, Tensor)
                x = x.to(self.activation_dtype)
            if layer != self._layers[-1] or targets is None:
                return x
            if metrics is not None:
                metrics.update(module.metric_sums(x, targets))
            return self._loss(module, x, targets, len(rows.positions))

    def _loss(self, module: Layer, output: Tree, targets: Tree, rows: int) -> Tensor:
        whole, found = self._job.training.microbatch, module.row_losses(output, targets)
        of_rows, weights = found or (None, None)
        if weights is not None:
            assert of_rows is not None, "it comes with weights"
            mean, weight = _widened(of_rows).sum() / whole, weights.sum(dtype=torch.float64)
            return torch.stack([mean.double(), weight])
        if of_rows is None:
            assert isinstance(output, Tensor)
            assert isinstance(targets, Tensor)
            mean = loss(output, targets)
        else:
            mean = _widened(of_rows).mean()
        mean = mean if rows == whole else mean * (rows / whole)
        return torch.stack([mean.double(), mean.new_full((), rows, dtype=torch.float64)])

    def backward(
        self,
        microbatch: int,
        gradient: Tensor | None = None,
        on_layer: OnLayer = lambda layer: None,
    ) -> Tensor | None:
        """Add the micro-batch's gradients to the layers', calling `on_layer` for each layer at
        once, and return that of the stage's input.

        `gradient` is that of the output, None on the last stage: the loss itself. The result is
        None where no gradient is needed, as on the first stage.
        """
        segments = self._in_flight.pop(microbatch)
        assert not any(s.deferred for s in segments), "the forward expected a split backward"
        rows, gradients = segments[0].rows, self._take_gradient(gradient)
        while segments:
            segment = segments.pop()
            gradients = self._backward(segment, gradients, segments)
            self._finish(on_layer)
            # Autograd has added to all of them: that is recorded before anything else can fail.
            added = segment.layers[::-1] if segment.adds else []
            complete = [one for layer in added for one in self._exchange.add(layer, microbatch)]
            self._note(complete)
            _tell(complete, on_layer)
        self._finish(on_layer)
        return self._give_gradient(gradients, rows)

    def backward_input(self, microbatch: int, gradient: Tensor | None = None) -> Tensor | None:
        """Run the backward as `backward` does, but leave most of the weights' gradients to
        `backward_weight`.

        Until then the inputs of the linear layers and the gradients of their outputs are kept.
        """
        segments = self._in_flight.pop(microbatch)
        assert all(s.deferred for s in segments if s.adds), "the forward expected a whole backward"
        due = self._deferred[microbatch] = deque()
        rows, gradients = segments[0].rows, self._take_gradient(gradient)
        while segments:
            segment = segments.pop()
            gradients = self._backward(segment, gradients, segments)
            due.extend(reversed(segment.deferred))
        return self._give_gradient(gradients, rows)

    def _take_gradient(self, gradient: Tensor | None) -> Gradients | None:
        """Return the output's gradients, from a received message."""
        if gradient is None:
            return None
        return self._wires[self._layers[-1]].gradients.unpack(gradient)

    def _give_gradient(self, gradients: Gradients | None, rows: int) -> Tensor | None:
        """Return the input's gradients packed for sending."""
        if gradients is None:
            return None
        return self._wires[self._layers[0] - 1].gradients.pack(gradients, rows, self.device)

    def _backward(
        self, segment: Segment, gradients: Gradients | None, left: Sequence[Segment]
    ) -> Gradients | None:
        """Run the backward of one segment. `left`: segments whose backward follows, the next one
        last."""
        first, last = segment.layers[0], segment.layers[-1]
        name = "layer" if first == last else f"layers {first} to"
        with (
            self._timeline.computing(name, last),
            # Where there is an exchange, a segment is one layer.
            self._exchange.computing(
                first, gradients=segment.adds, following=left[-1].layers[0] if left else None
            ),
        ):
            if not self._own:
                return segment.backward(gradients)
            which = f"layer {first}" if first == last else f"layers {first} to {last}"
            with running(f"model: the backward of {which}"):
                return segment.backward(gradients)

    def _finish(self, on_layer: OnLayer) -> None:
        """Wait for the exchange's sum under way, and record its result."""
        complete = self._exchange.finish()
        self._note(complete)
        _tell(complete, on_layer)

    def _note(self, complete: Iterable[Added]) -> None:
        for layer, microbatches in complete:
            self._state.layers[layer].added.update(microbatches)

    def settle(self) -> None:
        """Leave a step in the middle: drop micro-batches in flight, and add deferred gradients, so
        that no layer's gradient has a part of a micro-batch.

        Where several workers share the layers, all of them would have to add deferred gradients.
        There they are dropped. The layer's gradient may have the other part already, so it does not
        count.
        """
        self._in_flight.clear()
        if self._exchange.shared:
            unsure = {layer for due in self._deferred.values() for layer, _ in due}
            # A sum that is under way after the deferred part was added contains only that part.
            unsure.update(self._exchange.on_its_way if self._deferred else ())
            for layer in unsure:
                self._state.layers[layer].added.clear()
            self._deferred.clear()
        for microbatch in list(self._deferred):
            self.backward_weight(microbatch)

    def backward_weight(self, microbatch: int, on_layer: OnLayer = lambda layer: None) -> None:
        """Add the gradients that `backward_input` deferred, calling `on_layer` for each layer at
        once, and drop the micro-batch. An error of `on_layer` ends it after that layer."""
        due = self._deferred[microbatch]
        while due:
            layer, deferred = due[0]
            self._exchange.take_gradients(layer)
            deferred.add()
            self._finish(on_layer)
            complete = self._exchange.add(layer, microbatch)
            self._note(complete)
            # Remove it last: if the exchange fails, `settle` must find the layer.
            due.popleft()
            _tell(complete, on_layer)
        self._finish(on_layer)
        del self._deferred[microbatch]


def _tell(complete: Iterable[Added], on_layer: OnLayer) -> None:
    for layer, microbatches in complete:
        for _ in microbatches:
            on_layer(layer)


def _widened(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 if it is in bfloat16, as autocast's results are."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

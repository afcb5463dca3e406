"""Bench of layers, each a stage of its own, with random data of the job's shapes and types.

Also meters the memory that their operations take.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oobleck.core.instructions import LayerPart
from oobleck.core.job.description import TensorSketch, TreeSketch
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.planner.profile.memory import heap_and_mapped, with_holes
from oobleck.worker.models.own import constants
from oobleck.worker.models.tree import Tree, flatten, map_tensors, unflatten
from oobleck.worker.runtime.device import has_queue
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.mailbox import AHEAD, Packing, wire
from oobleck.worker.step.stage import StageRunner


def samples(job: JobSpec, rows: int, source: torch.Generator) -> tuple[Tree, Tree]:
    """Return inputs and targets in the form of the job's data."""
    model = job.model
    if not isinstance(model, OwnModelSpec):
        assert isinstance(model, ModelSpec), "there are two kinds"
        shape = (rows, model.sequence_length)
        tokens = torch.randint(model.vocabulary, shape, generator=source)
        return tokens, tokens

    def made(sketch: TreeSketch) -> Tree:
        return unflatten(sketch.structure, [values(one, rows, source) for one in sketch.tensors])

    return made(model.description.inputs), made(model.description.targets)


def values(sketch: TensorSketch, rows: int, source: torch.Generator) -> Tensor:
    """Return random numbers from 0 to 1, or zeros for integer types, which may be indices.

    Values from 0 to 1 are valid as probabilities and have logarithms.
    """
    shape, dtype = (rows, *sketch.shape), getattr(torch, sketch.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.rand(shape, generator=source).to(dtype)


@dataclass(slots=True)
class Seconds:
    """Seconds of every repeat, by operation."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    backward_input: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


class Bench:
    """Layers of one kind, each a stage of its own, with inputs of the right shape."""

    def __init__(
        self,
        job: JobSpec,
        layers: list[int],
        device: torch.device,
        rows: int,
        given: tuple[Tree, Tree] | None = None,
    ) -> None:
        """Build the layers.

        `rows`: rows of a micro-batch. `given`: input (as received, except for the first layer) and
        targets, with the initial weights. None: inputs, targets and weights are random.
        """
        self._job = job
        self._device = device
        self._layers = layers
        self.state = ModelState(job, device)
        self.seconds = Seconds()
        source = torch.Generator().manual_seed(job.training.seed)
        weights = torch.Generator(device).manual_seed(job.training.seed)
        for layer in layers:
            if given is not None:
                self.state.initialise(layer)
                continue
            # Drawing the job's initial weights would take seconds for a large layer.
            whole = self.state.allocate(layer, version=0)
            whole.storage.zero_()
            whole.storage[0].normal_(std=0.02, generator=weights)
            self.state.complete(layer)
        self._runners = [StageRunner(self.state, range(n, n + 1), job, device) for n in layers]
        first, last = self._runners[0].first, self._runners[0].last
        inputs, targets = samples(job, rows, source) if given is None else given

        def packed(packing: Packing) -> Tensor:
            made = [values(one, rows, source).to(device) for one in packing.tensors]
            return packing.pack(made, rows, device)

        below = None if first else wire(job, layers[0] - 1)
        above = None if last else wire(job, layers[0])
        self._input: Tree = map_tensors(lambda tensor: tensor.to(device), inputs)
        if below is not None and given is None:
            self._input = packed(below.values)
        self._targets = map_tensors(lambda tensor: tensor.to(device), targets) if last else None
        self._gradient = None if above is None else packed(above.gradients)
        self.output_bytes = 0 if above is None else rows * above.values.row_bytes
        self._rows = RowKeys(seed=job.training.seed, step=1, positions=tuple(range(rows)))
        self._step = 0

    def kept_blocks(self) -> list[int]:
        """Return the bytes of each block that one layer keeps of a micro-batch until its backward.

        The layer's input counts; its output is the next layer's input.
        """
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            alias = tensor.detach()  # the tensor itself would keep its own graph alive
            kept[alias.untyped_storage().data_ptr()] = alias
            return alias

        def keep_input(module: nn.Module, given: tuple[Tree, RowKeys]) -> None:
            for tensor in flatten(given[0]):
                pack(tensor)

        runner, layer = self._runners[0], self._layers[0]
        hook = self.state.module(layer).register_forward_pre_hook(keep_input)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.forward(0, self._input, self._rows, self._targets)
        hook.remove()
        for held in (*self.state.layers[layer].tensors, *constants(self.state.module(layer))):
            kept.pop(held.untyped_storage().data_ptr(), None)
        runner.settle()
        return [tensor.untyped_storage().nbytes() for tensor in kept.values()]

    def working_bytes(self, kept: Sequence[int]) -> tuple[int, int]:
        """Return the peak bytes of one micro-batch beside the state and the blocks `kept`.

        The two numbers are for the heap, with its holes, and for mapped memory. The incoming
        gradient counts, and so do messages posted ahead by a stage that begins and ends with this
        layer.
        """
        runner = self._runners[0]
        messages = [*(tensor.nbytes for tensor in flatten(self._input)), self.output_bytes]

        def run() -> None:
            runner.forward(0, self._input, self._rows, self._targets)
            runner.backward(0, self._gradient)

        made = peak_bytes(run, self._device)
        self.state.zero_gradients()
        heap, mapped = (
            max(0, peak + given - left) + AHEAD * given
            for peak, given, left in zip(
                made, self._sorted(messages), self._sorted(kept), strict=True
            )
        )
        if self._device.type == "cpu":
            heap = with_holes(heap, self._sorted(kept)[0])
        return heap, mapped

    def _sorted(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Return the blocks' heap and mapped bytes, separated as in `peak_bytes`."""
        return heap_and_mapped(blocks) if self._device.type == "cpu" else (sum(blocks), 0)

    def repeat(self) -> None:
        """Time forward of all layers, backward in reverse order, and the update of all.

        Times are means over the layers: delays by a busy host are part of a step too.
        """
        self.seconds.forward.append(fmean(map(self._forward_s, self._runners)))
        self.seconds.backward.append(fmean(map(self._backward_s, reversed(self._runners))))
        self.seconds.backward_input.append(fmean(map(self._backward_input_s, self._runners)))
        started = self._now()
        self.update()
        self.seconds.update.append((self._now() - started) / len(self._layers))

    def pass_through(self) -> float:
        """Pass forward and backward through all layers; return the seconds."""
        return sum(map(self._forward_s, self._runners)) + sum(
            map(self._backward_s, reversed(self._runners))
        )

    def pass_one(self) -> Tensor:
        """Pass forward and backward through the first layer; return its output as it is sent."""
        runner = self._runners[0]
        output = runner.forward(0, self._input, self._rows, self._targets)
        runner.backward(0, self._gradient)
        return output

    def evaluate(self) -> None:
        """Pass forward through all layers as in an evaluation."""
        rows, lowest = replace(self._rows, training=False), self._job.model.layer_count
        for runner in self._runners:
            metrics = Counter[str]()
            runner.forward(0, self._input, rows, self._targets, lowest=lowest, metrics=metrics)

    def _forward_s(self, runner: StageRunner) -> float:
        started = self._now()
        runner.forward(0, self._input, self._rows, self._targets)
        return self._now() - started

    def _backward_s(self, runner: StageRunner) -> float:
        started = self._now()
        runner.backward(0, self._gradient)
        return self._now() - started

    def _backward_input_s(self, runner: StageRunner) -> float:
        """Return the seconds of the first half of a split backward."""
        runner.forward(0, self._input, self._rows, self._targets, split=True)
        started = self._now()
        runner.backward_input(0, self._gradient)
        taken_s = self._now() - started
        runner.backward_weight(0)
        return taken_s

    def update(self) -> None:
        """Do once all that a step does to a layer's state: norm, update, and clearing gradients."""
        self._step += 1
        self.state.squared_norm(
            LayerPart(layer=layer, part=part)
            for layer in self._layers
            for part in ("tied", "own")
            if self.state.gradient_part(LayerPart(layer=layer, part=part)).numel()
        )
        self.state.apply(self._step, scale=1.0)
        for layer in self._layers:
            self.state.module(layer)  # updates the copy that it computes with
        self.state.zero_gradients()

    def _now(self) -> float:
        if has_queue(self._device):
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


# ---- Meter of the memory that torch's operations take, tensor by tensor: the peak.
#
# On a CPU every result with memory of its own counts until its last user releases it. Small and
# large blocks are counted separately, because the heap keeps the memory of small ones
# (`oobleck.planner.profile.memory`). On a GPU torch's allocator counts.


def peak_bytes(run: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """Return the peak bytes that `run` allocates on `device`, in the heap and mapped.

    A GPU has no such difference; there the second is 0.
    """
    if has_queue(device):
        board = torch.get_device_module(device)
        before: int = board.memory_allocated(device)
        board.reset_peak_memory_stats(device)
        run()
        peak: int = board.max_memory_allocated(device)
        return peak - before, 0
    footprint = Footprint()
    with footprint:
        run()
    return footprint.heap_peak_bytes, footprint.mapped_peak_bytes


class Footprint(TorchDispatchMode):
    """Context manager that records the peaks of allocations by this thread's operations in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.heap_peak_bytes = 0
        self.mapped_peak_bytes = 0
        self._heap_bytes = 0
        self._mapped_bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs or {}))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            key = storage._cdata
            if key not in given and key not in self._alive:
                size = storage.nbytes()
                self._alive.add(key)
                self._count(size, 1)
                weakref.finalize(storage, self._freed, key, size)
        self.heap_peak_bytes = max(self.heap_peak_bytes, self._heap_bytes)
        self.mapped_peak_bytes = max(self.mapped_peak_bytes, self._mapped_bytes)
        return results

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._count(size, -1)

    def _count(self, size: int, times: int) -> None:
        heap, mapped = heap_and_mapped([size])
        self._heap_bytes += times * heap
        self._mapped_bytes += times * mapped


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
            yield leaf.untyped_storage()

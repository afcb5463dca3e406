"""Layers that this worker holds: weights, moments, gradients and versions.

Owns which layers, or shares of them, are held or being received, and the update; `layer_state` has
one layer's numbers. Must not know stages, peers or plans.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from oobleck.core.instructions import LayerPart
from oobleck.core.job.spec import JobSpec
from oobleck.core.routes import Shard
from oobleck.worker.models.base import Layer, narrow_products
from oobleck.worker.models.registry import (
    build_layer,
    empty_layer,
    initial_values,
    initialise_parameters,
)
from oobleck.worker.runtime.device import has_queue
from oobleck.worker.runtime.errors import InvariantViolation
from oobleck.worker.state.layer_state import LayerState
from oobleck.worker.state.layout import Layout, Numbers, layout, point_parameters
from oobleck.worker.state.optimizer import Apart, update
from oobleck.worker.state.precision import float8_recipe, state_dtype, weights_dtype
from oobleck.worker.state.progress import NO_OMISSIONS, Omissions, Parameters, parameters_of

#: Numbers of a gradient that are copied at a time to compute the norm.
_NORM_PIECE = 1 << 18


class StateError(InvariantViolation):
    """Use of a layer in a state that the caller did not expect."""


def norms_of(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the norms, in float64, of pieces of `tensors`.

    A GPU computes those of many tensors in a few kernels, which sum in float64. On a CPU a norm in
    another type would first copy the whole tensor, so it is computed piece by piece, in a buffer
    that fits the cache. The pieces depend on the plan, because shares do. All workers have the same
    norm because the vote distributes it.
    """
    if has_queue(device):
        return list(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)) if tensors else []
    wide = torch.empty(_NORM_PIECE, dtype=torch.float64, device=device)
    return [
        torch.linalg.vector_norm(wide[: piece.numel()].copy_(piece))
        for tensor in tensors
        for piece in torch.split(tensor, _NORM_PIECE)
    ]


class ModelState:
    """Layers that this worker holds, and their update."""

    def __init__(self, job: JobSpec, device: torch.device) -> None:
        self.layers: dict[int, LayerState] = {}
        #: Other shares of held layers, at the same version, until the next commit.
        self.former: dict[int, LayerState] = {}
        #: Layers that are being received.
        self._partial: dict[int, LayerState] = {}
        self._job = job
        self._device = device
        self._dtype = state_dtype(job.training.precision)
        #: Each waits until a reader beside training has read the held state.
        self._readers: list[Callable[[], object]] = []

    def initialise(self, layer: int, *, part: int = 0, parts: int = 1) -> LayerState:
        """Hold `layer`, or a share of it, as it is before the first step (version 0)."""
        module = self._empty(layer)
        begun = initial_values(module)
        state = self.allocate(layer, version=0, part=part, parts=parts, module=module)
        state.storage.zero_()
        for row, initial in enumerate(self._job.training.optimizer.initial, 1):
            state.storage[row] = initial
        spec, seed = self._job.model, self._job.training.seed
        if parts == 1 and state.narrow is None:
            initialise_parameters(module, spec, seed, begun)
        else:
            whole = torch.zeros(state.layout.size, dtype=self._dtype, device=self._device)
            with torch.device("meta"):
                module = build_layer(spec, layer)
            point_parameters(module, state.layout, whole)
            initialise_parameters(module, spec, seed, begun)
            for numbers in state.numbers:
                state.storage[0, state.columns(numbers)] = whole[numbers.start : numbers.stop]
        self.complete(layer)
        return state

    def allocate(
        self,
        layer: int,
        *,
        version: int,
        part: int = 0,
        parts: int = 1,
        module: Layer | None = None,
    ) -> LayerState:
        """Allocate `layer`, or a share of it, after `version` steps, to receive its `storage`.

        It is held from `complete` on, so an interrupted transfer leaves nothing. `module`: the
        layer's module, if it exists.
        """
        made = self.make(Shard(layer, part, parts), version=version, module=module)
        self._partial[layer] = made
        return made

    def make(self, shard: Shard, *, version: int, module: Layer | None = None) -> LayerState:
        """Allocate a layer, or a share of it, without registering it as being received."""
        layer, parts = shard.layer, shard.parts
        flat, module = self._layout(layer), self._empty(layer) if module is None else module
        size = sum(map(len, flat.shard(shard)))
        rows = 1 + self._job.training.optimizer.moments
        storage = torch.empty(rows, size, dtype=self._dtype, device=self._device)
        gradient = torch.zeros(size, dtype=self._dtype, device=self._device)
        narrow = None
        if (computed := weights_dtype(self._job, layer)) != self._dtype:
            narrow = torch.empty(size, dtype=computed, device=self._device)
        gradients: tuple[Tensor, ...] = ()
        if parts == 1:
            weights = storage[0] if narrow is None else narrow
            gradients = point_parameters(module, flat, weights, gradient)
        return LayerState(
            shard=shard,
            layout=flat,
            module=module,
            storage=storage,
            narrow=narrow,
            gradient=gradient,
            gradients=gradients if self._parameters.keys else (),
            version=version,
        )

    @cached_property
    def _parameters(self) -> Parameters:
        return parameters_of(self._job)

    def _layout(self, layer: int) -> Layout:
        return layout(self._job.model, layer, self._job.training.optimizer.no_decay)

    def _empty(self, layer: int) -> Layer:
        """Return the module of `layer`, whose parameters still have no memory."""
        module = empty_layer(self._job.model, self._job.training.seed, layer)
        module.compiled = self._job.training.compile and self._job.model.compiles(layer)
        if (recipe := float8_recipe(self._job, layer)) is not None:
            narrow_products(module, recipe)
        for part in module.modules():
            for name, value in part.named_buffers(recurse=False):
                if not value.is_meta:
                    part._buffers[name] = self._placed(value)
        for parameter in module.parameters():
            if not parameter.requires_grad:
                parameter.data = self._placed(parameter.data)
        return module

    def _placed(self, constant: Tensor) -> Tensor:
        """Return the constant on the device, in the precision of the weights."""
        dtype = self._dtype if constant.is_floating_point() else constant.dtype
        return constant.to(self._device, dtype)

    def adopt(self, made: LayerState) -> None:
        """Hold a layer made by `make`, whose missing numbers are held here in another share."""
        layer = made.shard.layer
        self._partial[layer] = made
        self.write_own(layer)
        self.complete(layer)

    def complete(self, layer: int) -> None:
        """Hold an allocated layer, whose `storage` is complete.

        Another share of the layer stays as `former` until the next commit: others may need it if a
        transfer is interrupted.
        """
        state = self._partial.pop(layer)
        before = self.layers.get(layer)
        if before is not None and before.version == state.version:
            known = [before, *([self.former[layer]] if layer in self.former else [])]
            self.former[layer] = min(known, key=lambda one: one.shard.parts)
        self.layers[layer] = state

    def keep_only(self, shards: Collection[Shard]) -> None:
        """Forget all shares but `shards`."""
        for held in (self.layers, self.former):
            for layer in [i for i, state in held.items() if state.shard not in shards]:
                del held[layer]

    def snapshot(self, layer: int) -> Tensor:
        """Return a copy in host memory of the whole state of `layer` (1 + moments, n)."""
        return self.layers[layer].storage.detach().to("cpu", copy=True)

    def read_until(self, done: Callable[[], object]) -> None:
        """Delay the next update until `done` returns, because the state is being read."""
        self._readers.append(done)

    def load(
        self, layer: int, snapshot: Tensor, *, version: int, part: int = 0, parts: int = 1
    ) -> None:
        """Hold `layer`, or a share of it, with the values of `snapshot`.

        `snapshot` is of the whole layer, taken after `version` steps.
        """
        state = self.allocate(layer, version=version, part=part, parts=parts)
        for numbers in state.numbers:
            piece = snapshot[:, numbers.start : numbers.stop]
            state.storage[:, state.columns(numbers)] = piece.to(state.storage.device)
        self.complete(layer)

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a layer's state per number: for a weight and its moments."""
        return (1 + self._job.training.optimizer.moments) * self._dtype.itemsize

    def share(self, layer: int, start: Fraction, stop: Fraction) -> Numbers:
        """Return the numbers of that share of `layer`."""
        return self._layout(layer).share(start, stop)

    def read(self, layer: int, numbers: Numbers) -> Tensor:
        """Return the state (1 + moments, n) of those `numbers` of `layer`, for sending.

        All must be held. The result is contiguous, and not a copy if it is all that is held.
        """
        sources = [held[layer] for held in (self.layers, self.former) if layer in held]
        for state in sources:
            if state.numbers == numbers:
                return state.storage
        found = sources[0].storage.new_empty(sources[0].storage.shape[0], sum(map(len, numbers)))
        for state in sources:
            state.copy_to(numbers, found)
        return found

    def room(self, layer: int, numbers: Numbers) -> Tensor:
        """Return the tensor into which to receive `numbers` of an allocated layer, for `write`."""
        state = self._partial[layer]
        if state.numbers == numbers:
            return state.storage
        return state.storage.new_empty(state.storage.shape[0], sum(map(len, numbers)))

    def write(self, layer: int, numbers: Numbers, values: Tensor) -> None:
        """Write the received `values` into an allocated layer."""
        state = self._partial[layer]
        if values is state.storage:
            return
        offset = 0
        for some in numbers:
            state.storage[:, state.columns(some)] = values[:, offset : offset + len(some)]
            offset += len(some)

    def write_own(self, layer: int) -> None:
        """Copy the held numbers of an allocated layer into it."""
        state = self._partial[layer]
        for held in (self.layers, self.former):
            if layer in held:
                held[layer].copy_to(state.numbers, state.storage)

    def module(self, layer: int) -> Layer:
        """Return the module of `layer`, which must be whole or gathered, to compute with."""
        state = self._held(layer)
        if state.narrow is not None:
            state.computed()
        return state.module

    def weights(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained weights of `layer`, which must be whole, with their output names."""
        return self._held(layer).weights()

    def _held(self, layer: int) -> LayerState:
        state = self.layers.get(layer)
        if state is None:
            raise StateError(f"layer {layer} is not held; held are {self.held()}")
        return state

    def drop(self, layer: int) -> None:
        """Forget `layer`, if it is held."""
        self.layers.pop(layer, None)
        self._partial.pop(layer, None)

    def drop_partial(self) -> None:
        """Forget every layer whose transfer was interrupted."""
        self._partial.clear()

    def held(self) -> dict[int, int]:
        """Return the version of each layer that is held completely."""
        return {layer: state.version for layer, state in sorted(self.layers.items())}

    def zero_gradients(self, *, keeping: Container[int] = ()) -> None:
        """Begin a step with zero gradients; layers `keeping` keep those of an earlier attempt."""
        for layer, state in self.layers.items():
            state.reduced.clear()
            if layer not in keeping:
                state.clear_gradient()

    def used(self) -> list[bool]:
        """Return whether each parameter that a step may leave out got a gradient here.

        They are in the order of votes.
        """
        keys = self._parameters
        found = {
            keys.by_layer[layer][place]
            for layer, state in (self.layers.items() if keys.keys else ())
            for place in state.used()
        }
        return [key in found for key in keys.keys]

    def apart(self, layer: int, omitted: Omissions) -> list[Apart]:
        """Return the numbers of `layer` that an update with `omitted` treats separately."""
        found: list[Apart] = []
        if not (omitted.unused or omitted.missed):
            return found
        keys = self._parameters.by_layer[layer]
        for span, key in zip(self._layout(layer).parameters, keys, strict=True):
            unused, missed = omitted.of(key)
            if unused or missed:
                numbers = range(span.offset, span.end)
                found.append(Apart(numbers=numbers, unused=unused, missed=missed))
        return found

    def read_gradient(self, layer: int, start: Fraction, stop: Fraction) -> Tensor:
        """Return the gradient (n) to be applied to a held share of `layer`, in host memory."""
        held = self.layers[layer]
        numbers = held.layout.share(start, stop)
        found = held.gradient.new_empty(sum(map(len, numbers)))
        held.gradient_of(numbers, found)
        return found.cpu()

    def gradient_part(self, part: LayerPart) -> Tensor:
        """Return a view of a layer's own gradient: the part summed over one set of workers."""
        state = self.layers[part.layer]
        return state.gradient[state.columns(state.layout.part(part))]

    def reduced_part(self, part: LayerPart) -> Tensor:
        """Return the gradient that the update will apply to this part."""
        reduced = self.layers[part.layer].reduced.get(part)
        return self.gradient_part(part) if reduced is None else reduced

    def set_reduced(self, part: LayerPart, reduced: Tensor) -> None:
        """Set the gradient that the update applies to `part`, flat, instead of the own sum."""
        self.layers[part.layer].reduced[part] = reduced

    def squared_norm(self, parts: Iterable[LayerPart]) -> float:
        """Return the sum of squares of the reduced gradients of `parts`, in float64."""
        norms = norms_of([self.reduced_part(part) for part in parts], self._device)
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def apply(self, step: int, *, scale: float, omitted: Omissions = NO_OMISSIONS) -> None:
        """Apply the reduced gradients, times `scale`, to every held layer at version `step` - 1.

        Layers at `step` already, and parameters that `omitted` calls unused, do not change.
        """
        due = self._due(step)
        while self._readers:
            self._readers.pop()()
        if scale != 1.0:
            # All instances of a tied weight on one worker share one reduced gradient: scale it
            # once.
            reduced = {
                gradient.data_ptr(): gradient for state in due for _, gradient in state.applied()
            }
            for gradient in reduced.values():
                gradient.mul_(scale)
        slices = (
            one for state in due for one in state.slices(self.apart(state.shard.layer, omitted))
        )
        update(slices, self._job.training, step)
        for state in due:
            state.version = step

    def skip(self, step: int) -> None:
        """Commit `step` without an update, because its gradients were not finite."""
        for state in self._due(step):
            state.version = step

    def _due(self, step: int) -> list[LayerState]:
        wrong = {i: v for i, v in self.held().items() if v not in (step - 1, step)}
        if wrong:
            raise StateError(f"step {step} cannot be applied to layers at versions {wrong}")
        return [self.layers[i] for i, version in self.held().items() if version == step - 1]

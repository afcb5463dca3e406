"""Model state: the layers that this worker holds, with weights, moments, gradients and version.

Each layer's state is one flat tensor, so that it travels as one message, and its gradient, this
worker's own sum over micro-batches, is another. The modules' parameters and their gradients are
views into these. What an update applies are the reduced gradients, summed over all workers: tensors
that are given from outside, or the own sums themselves where nobody else holds the layer. Owns the
flat layout and the versions; knows nothing of stages, peers and plans: which layers to hold, and
what version they must reach, is said from outside.

The flat order is: the part tied to another layer, then what weight decay acts on (all matrices and
embeddings; norms are not decayed), then the rest. So each of these is one slice, and so is `own`,
everything but the tied part.
"""

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from oobleck.planner.job import JobSpec, ModelSpec, Precision
from oobleck.planner.program import LayerPart
from oobleck.worker.errors import InvariantViolation
from oobleck.worker.models import Layer, build_layer, initialise_parameters, tied_parameter
from oobleck.worker.optimizer import Slice, update


class StateError(InvariantViolation):
    """A layer is not in the state that the caller relies on."""


def state_dtype(precision: Precision) -> torch.dtype:
    """Type of weights, moments, gradients and of what passes between stages."""
    return torch.float64 if precision == "fp64" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one parameter lies in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The flat order of one layer: [0, tied) [tied, decayed) [decayed, size)."""

    entries: tuple[Entry, ...]
    tied: int
    decayed: int
    size: int


@lru_cache(maxsize=4096)
def layout(spec: ModelSpec, layer: int) -> Layout:
    """The flat layout of `layer`: a function of the model alone, so all holders agree on it."""
    with torch.device("meta"):
        module = build_layer(spec, layer)
    tied_name = tied_parameter(spec, layer)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    tied = [name for name in shapes if name == tied_name]
    decayed = [name for name in shapes if len(shapes[name]) > 1 and name != tied_name]
    rest = [name for name in shapes if len(shapes[name]) == 1]
    entries: list[Entry] = []
    for name in tied + decayed + rest:
        offset = entries[-1].end if entries else 0
        entries.append(Entry(name=name, shape=shapes[name], offset=offset))
    ends = [0, *(entry.end for entry in entries)]
    return Layout(
        entries=tuple(entries),
        tied=ends[len(tied)],
        decayed=ends[len(tied) + len(decayed)],
        size=ends[-1],
    )


def layer_sizes(spec: ModelSpec) -> list[int]:
    """Number of parameters of each layer."""
    return [layout(spec, layer).size for layer in range(spec.layer_count)]


@dataclass(slots=True, kw_only=True)
class LayerState:
    """One layer on this worker."""

    layer: int
    layout: Layout
    module: Layer
    #: (1 + moments, n): weights, then the optimizer's moments: AdamW's exp_avg and exp_avg_sq,
    #: SGD's momentum_buffer, if it has momentum.
    storage: Tensor
    #: (n): what backward adds to.
    gradient: Tensor
    #: The micro-batches of the step that are wholly in `gradient`.
    added: set[int] = field(default_factory=set)
    #: What the update applies, by part; scaled in place by it. A part that is missing here is that
    #: of `gradient`.
    reduced: dict[Literal["own", "tied"], Tensor] = field(default_factory=dict)
    #: Steps applied.
    version: int
    #: False while `storage` is still being received.
    whole: bool = False


def _place(
    spec: ModelSpec, layer: int, storage: Tensor, gradient: Tensor, version: int
) -> LayerState:
    """A layer whose parameters and gradients are views into the two flat tensors."""
    flat = layout(spec, layer)
    with torch.device("meta"):
        module = build_layer(spec, layer)
    for entry in flat.entries:
        owner_name, _, name = entry.name.rpartition(".")
        parameter = nn.Parameter(storage[0, entry.offset : entry.end].view(entry.shape))
        parameter.grad = gradient[entry.offset : entry.end].view(entry.shape)
        setattr(module.get_submodule(owner_name), name, parameter)
    return LayerState(
        layer=layer,
        layout=flat,
        module=module,
        storage=storage,
        gradient=gradient,
        version=version,
    )


class ModelState:
    """All layers of this worker, and their update."""

    def __init__(self, job: JobSpec, device: torch.device) -> None:
        self.layers: dict[int, LayerState] = {}
        self._job = job
        self._device = device
        self._dtype = state_dtype(job.training.precision)

    def initialise(self, layer: int) -> LayerState:
        """Hold `layer` as it is before the first step (version 0)."""
        state = self.allocate(layer, version=0)
        state.storage.zero_()
        initialise_parameters(state.module, self._job.model, self._job.training.seed)
        self.complete(layer)
        return state

    def allocate(self, layer: int, *, version: int) -> LayerState:
        """Room for `layer` after `version` steps, to be received into its `storage`.

        It is held and may be used only from `complete` on, so that a transfer which breaks off
        leaves no garbage behind that others would take for the layer.
        """
        size = layout(self._job.model, layer).size
        rows = 1 + self._job.training.optimizer.moments
        storage = torch.empty(rows, size, dtype=self._dtype, device=self._device)
        gradient = torch.zeros(size, dtype=self._dtype, device=self._device)
        self.layers[layer] = _place(self._job.model, layer, storage, gradient, version)
        return self.layers[layer]

    def complete(self, layer: int) -> None:
        """The `storage` of an allocated layer has been received as a whole."""
        self.layers[layer].whole = True

    def storage(self, layer: int) -> Tensor:
        """The whole state of `layer` as one contiguous tensor, to be sent or received."""
        return self.layers[layer].storage

    def snapshot(self, layer: int) -> Tensor:
        """A copy in host memory of the whole state of `layer` (1 + moments, n)."""
        return self.layers[layer].storage.detach().to("cpu", copy=True)

    def load(self, layer: int, snapshot: Tensor, *, version: int) -> None:
        """Hold `layer` as `snapshot`, taken after `version` steps, says."""
        self.allocate(layer, version=version).storage.copy_(snapshot)
        self.complete(layer)

    def module(self, layer: int) -> Layer:
        """The module of `layer`, which must be whole."""
        state = self.layers.get(layer)
        if state is None or not state.whole:
            raise StateError(f"layer {layer} is not held; held are {self.held()}")
        return state.module

    def drop(self, layer: int) -> None:
        """Forget `layer`; one that is not there is no error."""
        self.layers.pop(layer, None)

    def drop_partial(self) -> None:
        """Forget every layer whose transfer broke off."""
        for layer in [i for i, state in self.layers.items() if not state.whole]:
            self.drop(layer)

    def held(self) -> dict[int, int]:
        """Layer to version, of every layer whose state is whole."""
        return {layer: state.version for layer, state in sorted(self.layers.items()) if state.whole}

    def zero_gradients(self, *, keeping: Container[int] = ()) -> None:
        """Begin a step: backward adds to what is there. The layers `keeping` keep what they have
        of an earlier attempt at the step."""
        for layer, state in self.layers.items():
            state.reduced.clear()
            if layer not in keeping:
                state.gradient.zero_()
                state.added.clear()

    def note_added(self, layer: int, microbatch: int) -> None:
        """The gradient of `layer` has `microbatch` now, wholly."""
        self.layers[layer].added.add(microbatch)

    def gradient_part(self, part: LayerPart) -> Tensor:
        """The slice of a layer's own gradient that is summed over one set of workers: a view."""
        state = self.layers[part.layer]
        cut = state.layout.tied
        return state.gradient[:cut] if part.part == "tied" else state.gradient[cut:]

    def reduced_part(self, part: LayerPart) -> Tensor:
        """What the update will apply of it."""
        reduced = self.layers[part.layer].reduced.get(part.part)
        return self.gradient_part(part) if reduced is None else reduced

    def set_reduced(self, part: LayerPart, reduced: Tensor) -> None:
        """Have the update apply `reduced`, flat, instead of the own sum of `part`."""
        self.layers[part.layer].reduced[part.part] = reduced

    def _reduced_parts(self, state: LayerState) -> tuple[Tensor, Tensor]:
        """The tied part, which may be empty, and the own one."""
        tied, own = (
            self.reduced_part(LayerPart(layer=state.layer, part=part)) for part in ("tied", "own")
        )
        return tied, own

    def squared_norm(self, parts: Iterable[LayerPart]) -> float:
        """Sum of the squares of the reduced gradients of `parts`, in float64."""
        norms = [
            torch.linalg.vector_norm(self.reduced_part(part), dtype=torch.float64) for part in parts
        ]
        return float(torch.stack(norms).square().sum()) if norms else 0.0

    def apply(self, step: int, *, scale: float) -> None:
        """Take every held layer from version `step` - 1 to `step` with its reduced gradient times
        `scale`.

        A layer that is at `step` already stays as it is, so that rolling forward may be repeated;
        so does one that is still being received.
        """
        due = self._due(step)
        # Two places of the tied weight on one worker have one reduced gradient.
        reduced = {part.data_ptr(): part for state in due for part in self._reduced_parts(state)}
        for part in reduced.values():
            part.mul_(scale)
        update(self._slices(due), self._job.training, step)
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

    def _slices(self, due: list[LayerState]) -> Iterator[Slice]:
        """The tied part is a tensor of its own: vectorised kernels round the ends of a tensor
        unlike its middle, and all copies of the tied weight must stay equal to the last bit.
        """
        for state in due:
            flat = state.layout
            tied, own = self._reduced_parts(state)
            cut = flat.decayed - flat.tied
            for start, end, gradient, decayed in (
                (0, flat.tied, tied, True),
                (flat.tied, flat.decayed, own[:cut], True),
                (flat.decayed, flat.size, own[cut:], False),
            ):
                if start < end:
                    yield Slice(
                        storage=state.storage[:, start:end], gradient=gradient, decayed=decayed
                    )

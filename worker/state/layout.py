"""Flat order of a layer's numbers, the numbers of a share, and the file of a layer's state.

The part that is tied to other layers is first, then the own part. In each, the numbers subject to
weight decay are first, so there are four slices. A share of a layer, such as the second of three,
is that share of the tied part and that of the own part. Knows only the model and the job's
exceptions from weight decay.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from oobleck.core.checkpoint import MOST_LAYER_HEADER_BYTES, InvalidCheckpoint
from oobleck.core.instructions import LayerPart
from oobleck.core.job.model import AnyModel
from oobleck.core.routes import Shard
from oobleck.core.ties import groups
from oobleck.host.storage.folder import Content
from oobleck.host.storage.weight_files import WeightsError, check_content
from oobleck.planner.programs.transfer import CUT_NUMBERS, cut
from oobleck.worker.models.base import Layer, place_parameters
from oobleck.worker.models.registry import build_layer, tied_parameters
from oobleck.worker.runtime.errors import JobError

#: Most names of parameters in an error about an unknown name.
_NAMES_SHOWN = 6


#: Some of a layer's numbers: of the tied part, and of the own part.
Numbers = tuple[range, range]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRange:
    """Position of one parameter in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Flat order of one layer: four slices.

    They are [0, tied_decayed), [tied_decayed, tied), [tied, decayed) and [decayed, size).
    """

    parameters: tuple[ParameterRange, ...]
    tied: int
    decayed: int
    size: int
    #: End of the decayed numbers in the tied part.
    tied_decayed: int

    def share(self, start: Fraction, stop: Fraction) -> Numbers:
        """Return the numbers from `start` to `stop` of the tied part and of the own part."""
        own = self.size - self.tied
        return (
            range(cut(start, self.tied), cut(stop, self.tied)),
            range(self.tied + cut(start, own), self.tied + cut(stop, own)),
        )

    def shard(self, shard: Shard) -> Numbers:
        return self.share(shard.start, shard.stop)

    def part(self, part: LayerPart) -> range:
        share = part.share
        tied, own = self.share(Fraction(share.start, share.of), Fraction(share.stop, share.of))
        return tied if part.part == "tied" else own


@lru_cache(maxsize=4096)
def layout(spec: AnyModel, layer: int, no_decay: tuple[str, ...] = ()) -> Layout:
    """Return the flat layout of `layer`: a function of the job alone, equal for all holders.

    The numbers without decay begin at a multiple of `CUT_NUMBERS`, as shares do; the gap before
    them stays zero. `no_decay`: the job's patterns; a tied parameter is exempt by its name in any
    layer.
    """
    with torch.device("meta"):
        module = build_layer(spec, layer)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    tied = [*tied_parameters(spec, layer)]
    spared = _matching(_names(module), no_decay)
    spared.update(tied[number] for number in _spared_ties(spec, _sharing(spec, layer), no_decay))
    decayed = [name for name in shapes if len(shapes[name]) > 1 and name not in spared]
    parameters: list[ParameterRange] = []

    def append(names: list[str], end: int) -> int:
        for name in names:
            parameters.append(ParameterRange(name=name, shape=shapes[name], offset=end))
            end = parameters[-1].end
        return end

    # The order must be equal in all layers that share them.
    tied_rest = [name for name in tied if name not in decayed]
    end = append([name for name in tied if name in decayed], 0)
    tied_decayed = _whole_cuts(end, tied_rest)
    tied_end = append(tied_rest, tied_decayed)
    rest = [name for name in shapes if name not in decayed and name not in tied]
    own_decayed = append([name for name in decayed if name not in tied], tied_end) - tied_end
    decayed_end = tied_end + _whole_cuts(own_decayed, rest)
    size = append(rest, decayed_end)
    return Layout(
        parameters=tuple(parameters),
        tied=tied_end,
        decayed=decayed_end,
        size=size,
        tied_decayed=tied_decayed,
    )


def _whole_cuts(numbers: int, following: list[str]) -> int:
    """Return where `following` begins after `numbers` numbers; there is no gap if it is empty."""
    return numbers + -numbers % CUT_NUMBERS if following else numbers


def _names(module: Layer) -> dict[str, str]:
    """Return each parameter's name in an output: the layer's number, then the name."""
    output = {id(parameter): f"{module.layer}.{name}" for name, parameter in module.trained()}
    return {n: output[id(p)] for n, p in module.named_parameters() if id(p) in output}


def _matching(names: Mapping[str, str], patterns: tuple[str, ...]) -> set[str]:
    return {n for n, name in names.items() if any(fnmatchcase(name, one) for one in patterns)}


def _sharing(spec: AnyModel, layer: int) -> tuple[int, ...]:
    """Return the layers that share parameters with `layer`, including itself, or none."""
    return next((g for g in groups(spec.ties, spec.layer_count) if layer in g), ())


@lru_cache(maxsize=1024)
def _spared_ties(
    spec: AnyModel, sharing: tuple[int, ...], no_decay: tuple[str, ...]
) -> frozenset[int]:
    """Return the indices in `tied_parameters` of those exempt from decay.

    A parameter is exempt if its name in any of these layers matches a pattern.
    """
    spared: set[int] = set()
    for layer in sharing if no_decay else ():
        with torch.device("meta"):
            fitting = _matching(_names(build_layer(spec, layer)), no_decay)
        tied = tied_parameters(spec, layer)
        spared.update(number for number, name in enumerate(tied) if name in fitting)
    return frozenset(spared)


def check_no_decay(spec: AnyModel, no_decay: tuple[str, ...]) -> None:
    """Raise JobError with a pattern of the job that matches no parameter."""
    if not no_decay:
        return
    with torch.device("meta"):
        layers = [_names(build_layer(spec, layer)) for layer in range(spec.layer_count)]
    for pattern in no_decay:
        if not any(_matching(names, (pattern,)) for names in layers):
            known = [name for names in layers for name in names.values()]
            raise JobError(
                f"training.optimizer.no_decay: no parameter's name matches {pattern}; names are "
                f"{', '.join(known[:_NAMES_SHOWN])} and so on"
            )


def layer_sizes(spec: AnyModel, no_decay: tuple[str, ...] = ()) -> list[int]:
    """Return the number of numbers of each layer."""
    return [layout(spec, layer, no_decay).size for layer in range(spec.layer_count)]


def point_parameters(
    module: Layer, flat: Layout, weights: Tensor, gradient: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Make the parameters of `module`, and their gradients, views into flat tensors.

    Return the gradients, if any, in the layout's order. Each has a version of its own, which
    increases when autograd adds to it.
    """
    memory = {s.name: weights[s.offset : s.end].view(s.shape) for s in flat.parameters}
    place_parameters(module, memory)
    for span in flat.parameters:
        # Without this, autograd would first copy a gradient of another type to the type of the sum.
        module.get_parameter(span.name).grad_dtype = None
    return () if gradient is None else point_gradients(module, flat, gradient)


def point_gradients(module: Layer, flat: Layout, gradient: Tensor) -> tuple[Tensor, ...]:
    """Make the gradients of `module` views into `gradient`; return them in the layout's order."""
    views = []
    for span in flat.parameters:
        view = gradient[span.offset : span.end].view(span.shape).data
        module.get_parameter(span.name).grad = view
        views.append(view)
    return tuple(views)


# ---- Conversion of one layer's state to the bytes of a safetensors file, and back.
#
# Weights have the names of their parameters, moments `<parameter>.<moment>`. The flat state is in
# the order of the file's data, so writing copies nothing.


_DTYPES = {torch.float32: "F32", torch.float64: "F64"}
#: Alignment that the format requires of its data.
_ALIGNMENT = 8


def pack(
    snapshot: torch.Tensor, flat: Layout, moments: tuple[str, ...], metadata: Mapping[str, str]
) -> list[Content]:
    """Return the file of a layer's state (1 + moments, n), contiguous and in host memory.

    Its data is a view of `snapshot`, if the layout has no gap.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    width = snapshot.element_size()
    end = 0
    for moment in ("", *moments):
        for span in flat.parameters:
            begin, end = end, end + (span.end - span.offset) * width
            header[f"{span.name}.{moment}" if moment else span.name] = {
                "dtype": _DTYPES[snapshot.dtype],
                "shape": list(span.shape),
                "data_offsets": [begin, end],
            }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if end < snapshot.nbytes:  # safetensors allows no gaps
        spans = [snapshot[:, span.offset : span.end] for span in flat.parameters]
        snapshot = torch.cat(spans, dim=1)
    head = len(text).to_bytes(8, "little") + text
    if not snapshot.numel():  # a layer without parameters
        return [head]
    return [head, snapshot.cpu().numpy().data.cast("B")]


def unpack(
    content: bytes, flat: Layout, moments: tuple[str, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a layer's state (1 + moments, n) from its file. Raise InvalidCheckpoint."""
    try:
        check_content(content, MOST_LAYER_HEADER_BYTES)
        tensors = load(content)
    except (WeightsError, SafetensorError) as error:
        raise InvalidCheckpoint(f"is not a safetensors file: {error}") from error
    snapshot = torch.zeros(1 + len(moments), flat.size, dtype=dtype)
    for row, moment in enumerate(("", *moments)):
        for span in flat.parameters:
            name = f"{span.name}.{moment}" if moment else span.name
            tensor = tensors.get(name)
            if tensor is None:
                raise InvalidCheckpoint(f"holds no {name}")
            if tensor.shape != span.shape:
                raise InvalidCheckpoint(f"holds {name} as {tuple(tensor.shape)}, not {span.shape}")
            snapshot[row, span.offset : span.end] = tensor.reshape(-1)
    return snapshot

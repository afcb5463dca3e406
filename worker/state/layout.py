"""The flat order of a layer's numbers, and which of them belong to a share of the layer.

First the part that is tied to another layer, then what weight decay acts on, then the rest; so each
of these is one slice, and so is `own`, all but the tied part. A share of a layer, such as the
second of three, is that share of the tied part and that of the own one. Knows the model alone.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor, nn

from oobleck.planner.job.spec import AnyModel
from oobleck.planner.programs.instructions import LayerPart
from oobleck.planner.programs.shards import Shard
from oobleck.planner.programs.transfer import CUT_NUMBERS, cut
from oobleck.worker.models import Layer, build_layer, tied_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRange:
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

    parameters: tuple[ParameterRange, ...]
    tied: int
    decayed: int
    size: int
    #: Numbers before `decayed` that belong to no parameter.
    gap: range

    def share(self, start: Fraction, stop: Fraction) -> tuple[range, range]:
        """The numbers from `start` to `stop` of the tied part and of the own one."""
        own = self.size - self.tied
        return (
            range(cut(start, self.tied), cut(stop, self.tied)),
            range(self.tied + cut(start, own), self.tied + cut(stop, own)),
        )

    def shard(self, shard: Shard) -> tuple[range, range]:
        return self.share(shard.start, shard.stop)

    def part(self, part: LayerPart) -> range:
        share = part.share
        tied, own = self.share(Fraction(share.start, share.of), Fraction(share.stop, share.of))
        return tied if part.part == "tied" else own


@lru_cache(maxsize=4096)
def layout(spec: AnyModel, layer: int) -> Layout:
    """The flat layout of `layer`: a function of the model alone, the same for all holders. What is
    not decayed begins at a multiple of `CUT_NUMBERS`, as shares do; the gap before it stays
    zero."""
    with torch.device("meta"):
        module = build_layer(spec, layer)
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters() if p.requires_grad}
    tied = [*tied_parameters(spec, layer)]
    decayed = [name for name in shapes if len(shapes[name]) > 1 and name not in tied]
    rest = [name for name in shapes if len(shapes[name]) <= 1 and name not in tied]
    parameters: list[ParameterRange] = []

    def append(names: list[str], end: int) -> int:
        for name in names:
            parameters.append(ParameterRange(name=name, shape=shapes[name], offset=end))
            end = parameters[-1].end
        return end

    tied_end = append(tied, 0)
    decayed_end = append(decayed, tied_end)
    gap = decayed_end
    if rest:
        decayed_end += -(decayed_end - tied_end) % CUT_NUMBERS
    size = append(rest, decayed_end)
    return Layout(
        parameters=tuple(parameters),
        tied=tied_end,
        decayed=decayed_end,
        size=size,
        gap=range(gap, decayed_end),
    )


def layer_sizes(spec: AnyModel) -> list[int]:
    """How many numbers each layer has."""
    return [layout(spec, layer).size for layer in range(spec.layer_count)]


def point_parameters(
    module: Layer, flat: Layout, weights: Tensor, gradient: Tensor | None = None
) -> None:
    """Make the parameters of `module`, and their gradients, views into flat tensors."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for span in flat.parameters:
        aliases = names[id(module.get_parameter(span.name))]
        parameter = nn.Parameter(weights[span.offset : span.end].view(span.shape))
        if gradient is not None:
            parameter.grad = gradient[span.offset : span.end].view(span.shape)
        for alias in aliases:
            owner_name, _, name = alias.rpartition(".")
            setattr(module.get_submodule(owner_name), name, parameter)

"""Parts of all families: their type, dropout by sample instead of by call, initial values.

Knows no family by name, and nothing of stages, flat state, devices of others or plans.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime.random import RowKeys, Site, generator, keep_mask

#: Losses and weights of rows, (rows,) each; weights None: every row weighs 1.
RowLosses = tuple[Tensor, Tensor | None]

#: Samples of the current computation: modules of transformers do not pass them on to their dropout.
_rows: ContextVar[RowKeys] = ContextVar("rows")


@contextmanager
def keyed(rows: RowKeys) -> Iterator[None]:
    """Have the modules that run within compute these samples."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


class Layer(nn.Module):
    """A unit of placement and state: int64 ids (b, T) or (b, T, hidden) in, (b, T, hidden) out.

    In a user's model it takes the output of the layer before, and gives any tree.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, rows: RowKeys) -> Tensor:
        with keyed(rows):
            return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield its parameters, by their names in an output."""
        yield from self.named_parameters()

    def row_losses(self, output: Tree, targets: Tree) -> RowLosses | None:
        """Return losses by row from the last layer's `output`; None: use the token loss."""
        return None

    def metric_sums(self, output: Tree, targets: Tree) -> dict[str, float]:
        """Return further metrics of an evaluation, summed over rows; asked of the last layer."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Builders of the models of one kind; a family's module has them as `FAMILY`."""

    #: Builders, called with the model's spec and the number of the layer.
    embedding: Callable[[ModelSpec, int], Layer]
    block: Callable[[ModelSpec, int], Layer]
    head: Callable[[ModelSpec, int], Layer]
    #: Names of the shared weight in the embedding and in the head, where they are tied.
    tied: tuple[str, str]
    #: Function that gives a layer its initial weights, from (spec, seed, layer) alone. The last
    #: argument names the tied parameter, if any.
    initialise: Callable[[Layer, ModelSpec, int, str | None], None]


def place_parameters(module: nn.Module, memory: Mapping[str, Tensor]) -> None:
    """Move the parameters named in `memory` to the tensors given there.

    As in nn.Module.to, a parameter stays the same object if torch can give it that memory, so hooks
    and other references keep working. Otherwise, as from the meta device, a new parameter replaces
    it under all of its names.
    """
    aliases: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    for name, place in memory.items():
        parameter = module.get_parameter(name)
        if torch._has_compatible_shallow_copy_type(parameter, place):
            parameter.grad = None  # its type may differ from the new memory's
            parameter.data = place
            continue
        made = nn.Parameter(place)
        for alias in aliases[id(parameter)]:
            owner, _, last = alias.rpartition(".")
            setattr(module.get_submodule(owner), last, made)


def drops(share: float) -> bool:
    """Return whether there is dropout of that share now; not where a model is evaluated."""
    return share > 0.0 and _rows.get().training


def drop(x: Tensor, layer: int, site: Site, share: float) -> Tensor:
    """Drop `share` of the values of x (b, ...), and scale up the rest. The choice is a function of
    (seed, step, sample position, layer, site)."""
    if not drops(share):
        return x
    keep = keep_mask(_rows.get(), layer, site, width=x[0].numel(), dropout=share, device=x.device)
    return x * keep.view(x.shape) / (1.0 - share)


class Dropout(nn.Module):
    """nn.Dropout by sample instead of by call."""

    def __init__(self, share: float, layer: int, site: Site) -> None:
        super().__init__()
        #: Share under nn.Dropout's name: attention modules read it and apply it themselves.
        self.p = share
        self.layer = layer
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.layer, self.site, self.p) if self.training else x


@torch.no_grad()
def draw_parameters(
    module: Layer, seed: int, *, deviation: Callable[[str], float], tied: str | None
) -> None:
    """Fill weights at random and the rest with constants: a function of (seed, layer) alone.

    Matrices are normal with the `deviation` of their name, norms 1, biases 0. All draws are on the
    CPU and in float64, and rounded to the parameter's type. So they depend neither on the device
    nor on the precision. `tied` names the parameter that is the embedding's first one.
    """
    draws = generator(seed, "initial", module.layer)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        # The head's copy of the tied weight is the embedding's first draw again.
        source = generator(seed, "initial", 0) if name == tied and module.layer else draws
        values = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        parameter.copy_(values.mul_(deviation(name)))

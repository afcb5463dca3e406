"""Parts of all families: their type, dropout by sample, initial values, and the linear layer.

Knows no family by name, and nothing of stages, flat state, devices of others or plans.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.core.job.model import ModelSpec
from oobleck.worker.models import float8
from oobleck.worker.models.compiled import Prepared, run_compiled
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime.random import RowKeys, Site, generator, keep_mask

#: Losses and weights of rows, (rows,) each; weights None: every row weighs 1.
RowLosses = tuple[Tensor, Tensor | None]

#: Samples of the current computation. A context variable, since modules of transformers do not pass
#: arguments on to their dropout.
_rows: ContextVar[RowKeys] = ContextVar("rows")


@contextmanager
def keyed(rows: RowKeys) -> Iterator[None]:
    """Set the samples that modules compute within this context."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


class Layer(Prepared):
    """A unit of placement and state: int64 ids (b, T) or (b, T, hidden) in, (b, T, hidden) out.

    In a user's model it takes the output of the layer before, and gives any tree.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        #: True: it runs by compiled code.
        self.compiled = False

    def forward(self, x: Tensor, rows: RowKeys) -> Tensor:
        with keyed(rows):
            found = run_compiled(self, x) if self.compiled else self.compute(self.prepare(x))
            return cast("Tensor", found)

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


# ---- A linear layer whose weight gradient is added to its sum apart from autograd's.
#
# Zero-bubble schedules first compute the gradient that the previous stage waits for, and weight
# gradients when the worker would idle. Nearly all the work of weight gradients is in linear layers,
# so only their matrices are split. Biases, norms and embeddings get their gradients together with
# the input's.
#
# If products are narrower than the sum (bf16 into float32), a product is added to the sum without
# being rounded first. Autograd would write the rounded product to memory and read it again.
#
# The forward detaches the weight from autograd, so the ordinary backward computes only the input's
# gradient. A hook or a function keeps the tensors from which the weight's gradient is computed.


class WeightGradients:
    """Weight gradients that are added as soon as the backward has the output's gradient."""

    def linear(self, x: Tensor, layer: "Deferring") -> Tensor:
        """Apply `layer` to x (..., inputs)."""
        x, output = _applied(x, layer)
        found: Tensor = _AddGradient.apply(output, x.detach(), layer)  # type: ignore[no-untyped-call]  # torch's
        return found


class _AddGradient(torch.autograd.Function):
    """Identity that adds the gradient of a linear layer's weight in its backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, layer: "Deferring") -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        ctx.mark_dirty(output)  # not a view of it, which users could not change in place
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.layer.add_gradient(x, gradient)
        return gradient, None, None


class DeferredGradients(WeightGradients):
    """Weight gradients that the backward of one micro-batch leaves for later: each linear layer's
    input and its output's gradient, until `add`."""

    def __init__(self) -> None:
        self._due: deque[tuple[Deferring, Tensor, Tensor]] = deque()

    def linear(self, x: Tensor, layer: "Deferring") -> Tensor:
        x, output = _applied(x, layer)
        kept = x.detach()

        def keep(gradient: Tensor) -> None:
            self._due.append((layer, kept, gradient))

        output.register_hook(keep)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output

    @torch.no_grad()
    def add(self) -> None:
        """Add them to the weights' gradients, and free each after its use. The product is the same
        as in an undivided backward, so the result is the same to the last bit."""
        while self._due:
            layer, x, gradient = self._due.popleft()
            layer.add_gradient(x, gradient)


def _applied(x: Tensor, layer: "Deferring") -> tuple[Tensor, Tensor]:
    """Return the layer's input in the type that it is multiplied in, and its output, whose graph
    lacks the weight."""
    # Round before autocast would, so that the rounded input is the one that is kept.
    x = _autocast(x)
    return x, layer.multiplied(x, layer.matrix(layer.weight.detach()))


def _autocast(x: Tensor) -> Tensor:
    """Return `x` in the type that autocast multiplies in, where it is on."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of `left` and `right` to `total`. A product of narrower numbers is
    summed in the type of `total`, and never rounded to theirs."""
    if left.dtype == total.dtype:
        total.add_(left.mm(right))
    elif sums_wide(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def sums_wide(device: torch.device) -> bool:
    """Return whether torch has a product of narrow numbers there that adds to wide ones."""
    return device.type == "cuda" and torch.version.hip is None


_added: ContextVar[WeightGradients | None] = ContextVar("added", default=None)


@contextmanager
def adding(gradients: WeightGradients | None) -> Iterator[None]:
    """Have forwards within leave their weight gradients to `gradients`; None: to autograd."""
    token = _added.set(gradients)
    try:
        yield
    finally:
        _added.reset(token)


class Deferring(nn.Module):
    """Base of linear layers whose weight's gradient may be left for later."""

    weight: Tensor
    bias: Any
    #: Recipe of its products in float8; None: they are in the type of the input.
    recipe: float8.Recipe | None = None

    def forward(self, x: Tensor) -> Tensor:
        # Compiled code leaves all gradients to autograd: otherwise the sums would have to be inputs
        # of the compiled forward that its backward changes. Without a graph, as in the first
        # forward of a recomputed layer, there is no gradient.
        graph = not torch.compiler.is_compiling() and x.requires_grad and torch.is_grad_enabled()
        added = _added.get() if graph else None
        if added is None or not self.weight.requires_grad:
            return self.multiplied(x, self.matrix(self.weight))
        return added.linear(x, self)

    def multiplied(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return x (..., inputs) by the weight `matrix`, plus the bias."""
        offset = self.offset()
        if self.recipe is None or not float8.fits(x := _autocast(x)):
            return F.linear(x, matrix, offset)
        product = float8.multiply(x, matrix, self.recipe)
        return product if offset is None else product + offset.to(product.dtype)

    def matrix(self, values: Tensor) -> Tensor:
        """Return `values`, in the shape of the weight, as (outputs, inputs)."""
        return values

    def factors(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices whose product is the weight's gradient, from input (n, inputs) and
        output gradient (n, outputs)."""
        return gradient.t(), x

    def add_gradient(self, x: Tensor, gradient: Tensor) -> None:
        """Add the weight's gradient from input (..., inputs) and output gradient (..., outputs)."""
        x, gradient, found = x.flatten(0, -2), gradient.flatten(0, -2), None
        if self.recipe is not None and float8.fits(x):
            found = float8.weight_gradient(x, gradient, self.recipe)
        left, right = self.factors(x, gradient)
        if self.weight.grad is None:
            made = left.mm(right) if found is None else self.matrix(found)
            self.weight.grad = made.to(self.weight.dtype)
        elif found is None:
            add_product(self.weight.grad, left, right)
        else:
            self.matrix(self.weight.grad).add_(found)

    def offset(self) -> Tensor | None:
        """Return what is added to the product; a subclass may cut parts of the bias from
        autograd."""
        bias: Tensor | None = self.bias
        return bias


def narrow_products(module: nn.Module, recipe: float8.Recipe) -> None:
    """Have the linear layers of `module` multiply in float8, if their sizes fit its kernels."""
    split_linear(module)  # compiled ones, too
    for part in module.modules():
        if isinstance(part, Deferring) and float8.takes(part.weight):
            part.recipe = recipe


class Linear(Deferring):
    """Linear layer whose weights have no values yet."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None


def is_hooked(parameter: Tensor) -> bool:
    """Return whether `parameter` has hooks, which see or change its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _computed_again() -> bool:
    """Return whether this forward may be repeated in the backward, as by torch.utils.checkpoint.
    Both runs must keep the same tensors for autograd, so neither may defer gradients."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _SplitLinear(Deferring, nn.Linear):
    """Linear layer of torch with this split, which still passes as an nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        # Only autograd calls hooks, so do not leave the gradient for later.
        plain = torch.compiler.is_compiling() or is_hooked(self.weight) or _computed_again()
        return self.multiplied(x, self.weight) if plain else super().forward(x)


def split_linear(module: nn.Module) -> None:
    """Have every nn.Linear in `module` leave its weight's gradient for later where that is wanted.
    Layers that may compute something else stay as they are: subclasses, and those whose weight is
    made of other parameters, as by weight_norm."""
    for part in module.modules():
        if is_plain(part):
            part.__class__ = _SplitLinear


def is_plain(part: nn.Module) -> bool:
    """Return whether `part` is a linear layer of torch whose weight is a parameter."""
    return type(part) is nn.Linear and "weight" in part._parameters


class TransposedLinear(Linear):
    """A linear layer that keeps its weight as (inputs, outputs), such as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=True)
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def matrix(self, values: Tensor) -> Tensor:
        return values.t()

    def factors(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return x.t(), gradient

"""Matrix products of linear layers in float8, by torchao's recipes of dynamic scaling.

Each factor is multiplied by a scale, so that its largest number becomes float8's largest, and is
rounded; torch multiplies the rounded factors and divides by the scales. A scale depends on nothing
but its factor. So a layer that is computed again, on any worker, gives the same bits, and a
checkpoint has no more numbers than one of bfloat16.

torchao's own Float8Linear makes the weight's gradient in autograd's backward, in one piece with the
input's. A split backward needs it apart, so only the recipes are torchao's (0.18), and
`torch._scaled_mm`, which it uses as well. Must not know layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oobleck.core.job.spec import Float8Recipe, fit_float8

#: Least magnitude that a scale is made for, against a division by zero.
_LEAST = 1e-12
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Types and scales of the factors of a linear layer's three products."""

    #: True: one scale per row of the left factor and per column of the right one, and all scales
    #: are rounded down to powers of two. False: one scale per factor.
    rowwise: bool
    #: Whether the weight has one scale per column in the product that is the input's gradient.
    rowwise_backward: bool
    #: Type of the output's gradient; the other factors are in e4m3.
    gradient: torch.dtype
    #: True: the product that is the weight's gradient is in float8, too.
    weight_gradient: bool


RECIPES: Mapping[Float8Recipe, Recipe] = {
    "tensorwise": Recipe(
        rowwise=False,
        rowwise_backward=False,
        gradient=_E5M2,
        weight_gradient=True,
    ),
    "rowwise": Recipe(
        rowwise=True,
        rowwise_backward=True,
        gradient=_E4M3,
        weight_gradient=True,
    ),
    "rowwise_with_gw_hp": Recipe(
        rowwise=True,
        rowwise_backward=False,
        gradient=_E4M3,
        weight_gradient=False,
    ),
}


def fits(x: Tensor) -> bool:
    """Return whether an input is multiplied in float8: one with rows, in bfloat16. Code that leaves
    autocast wants more precise products."""
    return x.dtype == torch.bfloat16 and x.dim() > 1 and x.numel() > 0


def takes(weight: Tensor) -> bool:
    """Return whether torch has a float8 product with a weight of that shape."""
    return weight.dim() == 2 and fit_float8(*weight.shape)


def is_apart(order: Sequence[object]) -> bool:
    """Return whether the last layer of a model keeps its precision: it is one of several, and built
    like no other. `order`: each layer's kind."""
    return order.count(order[-1]) == 1 < len(order)


def multiply(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """Multiply x (..., inputs) with `weight` (outputs, inputs), as a linear layer without bias."""
    found: Tensor = _Multiply.apply(x, weight, recipe)  # type: ignore[no-untyped-call]  # torch's
    return found


def weight_gradient(x: Tensor, gradient: Tensor, recipe: Recipe) -> Tensor | None:
    """Return the weight's gradient (outputs, inputs) from input (n, inputs) and output gradient
    (n, outputs), in bfloat16. None: it is to be a product of bfloat16."""
    if not recipe.weight_gradient or not fit_float8(len(x)):
        return None
    left = _rounded(gradient.t(), recipe.gradient, recipe, rowwise=recipe.rowwise)
    return _product(left, _rounded(x.t(), _E4M3, recipe, rowwise=recipe.rowwise))


class _Multiply(torch.autograd.Function):
    """Product of a linear layer, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        # A frozen weight needs no input in the backward.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.recipe = recipe
        left = _rounded(x.flatten(0, -2), _E4M3, recipe, rowwise=recipe.rowwise)
        right = _rounded(weight, _E4M3, recipe, rowwise=recipe.rowwise)
        found = _product(left, right, fast=True)
        # A view of a function's result could not be changed in place.
        whole: Tensor = torch.ops.aten._unsafe_view(found, (*x.shape[:-1], len(weight)))
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        rows = gradient.flatten(0, -2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            left = _rounded(rows, recipe.gradient, recipe, rowwise=recipe.rowwise)
            right = _rounded(weight.t(), _E4M3, recipe, rowwise=recipe.rowwise_backward)
            of_x = _product(left, right).view(*gradient.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            inputs = x.flatten(0, -2)
            found = weight_gradient(inputs, rows, recipe)
            of_weight = (rows.t().mm(inputs) if found is None else found).to(weight.dtype)
        return of_x, of_weight, None


def _rounded(
    factor: Tensor, dtype: torch.dtype, recipe: Recipe, *, rowwise: bool
) -> tuple[Tensor, Tensor]:
    """Return `factor` (rows, summed), scaled and in float8, and the reciprocals of its scales:
    (rows, 1) if `rowwise`, else (1, 1)."""
    summed = 1 if rowwise else (0, 1)
    largest = torch.linalg.vector_norm(factor, math.inf, dim=summed, keepdim=True)
    most = torch.finfo(dtype).max
    # In float64, as torch's compiler divides float32 in another way than its kernels.
    scale = (most / largest.double().clamp(min=_LEAST)).float()
    if recipe.rowwise:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    narrow = (factor * scale).clamp_(min=-most, max=most).to(dtype)
    return narrow.contiguous(), scale.reciprocal()


def _product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], *, fast: bool = False
) -> Tensor:
    """Return the product of two results of `_rounded`, (rows, rows), in bfloat16. `fast`: sums on a
    GPU may be less precise, as is torchao's choice for outputs alone.

    With scales by row a kernel without fast sums is slow (as torchao found), so the product is
    scaled apart.
    """
    (a, by_a), (b, by_b) = left, right
    by_b = by_b.t()
    after = None
    if by_a.numel() == by_b.numel() == 1:
        by_a, by_b = by_a.reshape(()), by_b.reshape(())
    elif fast:
        by_a, by_b = by_a.expand(len(a), 1).contiguous(), by_b.expand(1, len(b)).contiguous()
    else:
        after = by_a * by_b
        by_a = by_b = after.new_ones(())
    # On a CPU torch widens and scales the factors first, and autocast would round them again.
    with torch.autocast(a.device.type, enabled=False):
        found = torch._scaled_mm(
            *(a, b.t()), scale_a=by_a, scale_b=by_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return found if after is None else found.mul_(after)

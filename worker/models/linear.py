"""A linear layer whose weight gradient may be left for later.

Zero-bubble schedules make the gradient that the stage before waits for first, and weight gradients
when there is nothing else to do. Nearly all the work of a weight gradient is in the matrices of
linear layers, so only those are split. Biases, norms and embeddings get theirs with the input's.

It needs nothing but tensor hooks. In the forward the weight stands outside of autograd, so the
ordinary backward makes the input's gradient alone. A hook keeps the tensors that the weight's
gradient is made of.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeferredGradients:
    """Weight gradients that the backward of one micro-batch leaves for later: each linear layer's
    input and its output's gradient, until `add`."""

    def __init__(self) -> None:
        self._due: deque[tuple[Deferring, Tensor, Tensor]] = deque()

    def linear(self, x: Tensor, layer: "Deferring") -> Tensor:
        """Apply `layer` to x (..., inputs), and leave the weight's gradient for later."""
        if torch.is_autocast_enabled(x.device.type):
            # Autocast would do this inside. Done here, the rounded input is the one that is kept.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output = F.linear(x, layer.matrix().detach(), layer.offset())
        kept = x.detach()

        def keep(gradient: Tensor) -> None:
            self._due.append((layer, kept, gradient))

        output.register_hook(keep)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output

    @torch.no_grad()
    def add(self) -> None:
        """Add them to the weights' gradients, and free each after its use. The product is the same
        as autograd's own, so the result is the same to the last bit."""
        while self._due:
            layer, x, gradient = self._due.popleft()
            weight = layer.weight
            product = layer.product(x.flatten(0, -2), gradient.flatten(0, -2)).to(weight.dtype)
            if weight.grad is None:
                weight.grad = product
            else:
                weight.grad.add_(product)


_deferred: ContextVar[DeferredGradients | None] = ContextVar("deferred", default=None)


@contextmanager
def deferring(deferred: DeferredGradients | None) -> Iterator[None]:
    """Have forwards within leave their weight gradients to `deferred`; None: to the backward."""
    token = _deferred.set(deferred)
    try:
        yield
    finally:
        _deferred.reset(token)


class Deferring(nn.Module):
    """Base of linear layers whose weight's gradient may be left for later."""

    weight: Tensor
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        # There is no gradient without a graph, as in a forward that is computed again later.
        deferred = _deferred.get() if x.requires_grad and torch.is_grad_enabled() else None
        if deferred is None or not self.weight.requires_grad:
            return F.linear(x, self.matrix(), self.offset())
        return deferred.linear(x, self)

    def matrix(self) -> Tensor:
        """Return the weight as (outputs, inputs)."""
        return self.weight

    def product(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the weight's gradient from input (n, inputs) and output gradient (n, outputs)."""
        return gradient.t().mm(x)

    def offset(self) -> Tensor | None:
        """Return what is added to the product; a subclass may cut parts of the bias from
        autograd."""
        bias: Tensor | None = self.bias
        return bias


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
    """Return whether this forward may be run once more in the backward, as by
    torch.utils.checkpoint. It must keep the same tensors then, where nothing is left for later."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _SplitLinear(Deferring, nn.Linear):
    """Linear layer of torch with this split, which still passes as an nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        # Only autograd calls hooks, so do not leave the gradient for later.
        plain = is_hooked(self.weight) or _computed_again()
        return nn.Linear.forward(self, x) if plain else super().forward(x)


def split_linear(module: nn.Module) -> None:
    """Have every nn.Linear in `module` leave its weight's gradient for later where that is wanted.
    Layers that may compute something else stay as they are: subclasses, and those whose weight is
    made of other parameters, as by weight_norm."""
    for part in module.modules():
        if type(part) is nn.Linear and "weight" in part._parameters:
            part.__class__ = _SplitLinear


class TransposedLinear(Linear):
    """A linear layer that keeps its weight as (inputs, outputs), such as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=True)
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def matrix(self) -> Tensor:
        return self.weight.t()

    def product(self, x: Tensor, gradient: Tensor) -> Tensor:
        return x.t().mm(gradient)

"""A linear layer whose weight gradient may be left for later.

Zero-bubble schedules make the gradient that the stage before waits for first, and weight gradients
when there is nothing else to do. Nearly all the work of a weight gradient is in the linear layers,
so only those are split: norms and embeddings get theirs with the input's. It needs nothing but
tensor hooks: in the forward the weight stands outside of autograd, so the ordinary backward makes
the input's gradient alone, and a hook keeps what the weight's is made of.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeferredGradients:
    """Weight gradients that the backward of one micro-batch leaves for later.

    Keeps for each linear layer its input and its output's gradient until `add`; everything else of
    the micro-batch is freed by the backward that makes the input's gradient.
    """

    def __init__(self) -> None:
        self._due: deque[tuple[Tensor, Tensor, Tensor]] = deque()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., n) times the weight's transpose, with the weight's gradient left for later."""
        if torch.is_autocast_enabled(x.device.type):
            # What autocast would do inside; done here, the rounded input is what is kept.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output = F.linear(x, weight.detach())
        kept = x.detach()

        def keep(gradient: Tensor) -> None:
            self._due.append((weight, kept, gradient))

        output.register_hook(keep)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output

    @torch.no_grad()
    def add(self) -> None:
        """Add them to the weights' gradients, freeing each after its use.

        The same product, of the same layout, as autograd's own for a linear layer, so the result
        is the same to the last bit.
        """
        while self._due:
            weight, x, gradient = self._due.popleft()
            product = gradient.flatten(0, -2).t().mm(x.flatten(0, -2)).to(weight.dtype)
            if weight.grad is None:
                weight.grad = product
            else:
                weight.grad.add_(product)


_deferred: ContextVar[DeferredGradients | None] = ContextVar("deferred", default=None)


@contextmanager
def deferring(deferred: DeferredGradients | None) -> Iterator[None]:
    """Forwards within leave their weight gradients to `deferred`; None: to the backward."""
    token = _deferred.set(deferred)
    try:
        yield
    finally:
        _deferred.reset(token)


class Linear(nn.Linear):
    """nn.Linear without bias, as far as its weight gradient may be left for later."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        deferred = _deferred.get()
        if deferred is None or not x.requires_grad:
            return super().forward(x)
        return deferred.linear(x, self.weight)

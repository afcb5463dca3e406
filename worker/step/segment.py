"""What a micro-batch keeps of layers in a row between its forward and its backward.

Owns one piece for autograd: its input, its output's graph or what makes it, and the weight
gradients that are left for later. Must not know micro-batches, stages or peers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from oobleck.worker.models.linear import DeferredGradients


class Segment:
    """A layer of a micro-batch, or several in a row, between forward and backward."""

    def __init__(self, *, leaf: Tensor | None, adds: bool, idle: bool) -> None:
        """`leaf`: what the gradient is wanted of, the input; None where nobody wants it. `adds`:
        whether the layers' gradients are to get the micro-batch's. `idle`: this worker has no row
        of it."""
        self._leaf = leaf
        self._idle = idle
        self.adds = adds
        self.layers: list[int] = []
        #: Where its backward is split: what collects each layer's weight gradients for later.
        self.deferred: list[DeferredGradients] = []
        #: With its graph, or what makes it with its graph.
        self._output: Tensor | Callable[[], Tensor] | None = None

    def append(
        self,
        layer: int,
        output: Tensor | Callable[[], Tensor],
        deferred: DeferredGradients | None,
    ) -> None:
        self.layers.append(layer)
        self._output = output
        if deferred is not None:
            self.deferred.append(deferred)

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """From the gradient of the output to that of the input, adding the weights' or not."""
        leaf, output = self._leaf, self._output
        if self._idle or (leaf is None and not self.adds):
            return None
        assert output is not None, "a segment has a layer"
        if not isinstance(output, Tensor):
            output = output()
        if self.adds or leaf is None:
            torch.autograd.backward(output, gradient)
            return None if leaf is None else leaf.grad
        return torch.autograd.grad(output, leaf, gradient)[0]

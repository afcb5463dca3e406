"""Segment of a micro-batch that autograd runs at once: a layer, or several consecutive ones.

Owns the step from the gradients of a segment's output to those of its input. Must not know stages,
plans or messages.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oobleck.worker.models.linear import DeferredGradients
from oobleck.worker.models.tree import Tree
from oobleck.worker.step.wire import Wire

#: Gradients of the tensors at a boundary that have one; None: it does not depend on that tensor.
Gradients = Sequence[Tensor | None]


class Segment:
    """Layer of a micro-batch, or several consecutive ones, between forward and backward."""

    def __init__(
        self, *, leaves: list[Tensor] | None, adds: bool, rows: int, weight: float
    ) -> None:
        """Make a segment.

        `leaves`: tensors of the input that need gradients; None if no gradient of the input is
        needed. `adds`: whether the layers' gradients get the micro-batch's. `rows`: this worker's
        rows of it. `weight`: weight of its loss in the step's, of which gradients are taken.
        """
        self._leaves = leaves
        self._weight = weight
        self.adds = adds
        self.rows = rows
        self.layers: list[int] = []
        #: With a split backward: each layer's deferred weight gradients.
        self.deferred: list[tuple[int, DeferredGradients]] = []
        #: Output with its graph, or a function that makes it.
        self._output: Tree | Callable[[], Tree] | None = None
        #: Wire that the output passes through; None: the output is the loss.
        self._above: Wire | None = None

    def append(
        self,
        layer: int,
        output: Tree | Callable[[], Tree],
        above: Wire | None,
        deferred: DeferredGradients | None,
    ) -> None:
        self.layers.append(layer)
        self._output, self._above = output, above
        if deferred is not None:
            self.deferred.append((layer, deferred))

    def backward(self, gradients: Gradients | None) -> Gradients | None:
        """Compute the gradients of the input from those of the output, None for the loss. Adds the
        weights' gradients where the segment `adds`."""
        leaves, output = self._leaves, self._output
        if not self.rows:
            return None
        if not self.adds and not leaves:
            return leaves
        assert output is not None, "a segment has a layer"
        if callable(output):
            output = output()
        roots, gradients = self._roots(output, gradients)
        if not roots:
            return leaves and [None] * len(leaves)
        if self.adds or not leaves:
            torch.autograd.backward(roots, gradients)
            return leaves and [leaf.grad for leaf in leaves]
        return torch.autograd.grad(roots, leaves, gradients, allow_unused=True)

    def _roots(
        self, output: Tree, gradients: Gradients | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tensors that the backward begins with, and their gradients. A tensor may lack
        a graph here, such as one without a wanted weight before it, from the lowest layer on."""
        if self._above is None:
            assert isinstance(output, Tensor)
            if not output.requires_grad:
                return [], []
            return [output], [torch.full_like(output, self._weight)]
        assert gradients is not None, "the layer above has a backward"
        roots: list[Tensor] = []
        found: list[Tensor | None] = []
        for root, gradient in zip(self._above.with_gradient(output), gradients, strict=True):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                found.append(gradient)
        return roots, found

"""Segment of a micro-batch that autograd runs in one go: a layer, or several in a row.

Owns the step from the gradients of a segment's output to those of its input. Must not know stages,
plans or what travels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from oobleck.worker.models.linear import DeferredGradients
from oobleck.worker.models.tree import Tree
from oobleck.worker.step.wire import Wire

#: Of the tensors at a boundary that have a gradient; None: it does not depend on that tensor.
Gradients = Sequence[Tensor | None]


class Segment:
    """A layer of a micro-batch, or several in a row, between forward and backward."""

    def __init__(
        self, *, leaves: list[Tensor] | None, adds: bool, rows: int, weight: float
    ) -> None:
        """`leaves`: what gradients are wanted of, in the input; None where nobody wants them.
        `adds`: whether the layers' gradients are to get the micro-batch's. `rows`: that this worker
        has of it. `weight`: of its loss in the step's, of which gradients are taken."""
        self._leaves = leaves
        self._weight = weight
        self.adds = adds
        self.rows = rows
        self.layers: list[int] = []
        #: Where its backward is split: each layer's weight gradients, which are left for later.
        self.deferred: list[tuple[int, DeferredGradients]] = []
        #: With its graph, or what makes it with its graph.
        self._output: Tree | Callable[[], Tree] | None = None
        #: What the output passes through; None: it is the loss.
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
        a graph here, such as one that no wanted weight comes before, from the lowest layer on."""
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

"""A model of your own, as a list of layers.

    from functools import partial
    from torch import nn
    from oobleck.model import Model

    def tagger(words: int, width: int, tags: int) -> Model:
        return Model(
            layers=[
                partial(nn.Embedding, words, width),
                partial(Block, width),
                partial(nn.Linear, width, tags),
            ],
            loss=per_row,
        )

A layer is a unit of placement: a worker builds those that it holds, and no others. Each takes what
the layer before it gives, the first one the inputs of a micro-batch: one tensor, or a tuple, list
or dict of tensors, passed as one argument. Every tensor has the micro-batch's rows as its first
dimension, and no row may change what becomes of another: rows are computed where there is room.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

#: What passes between layers: a tensor, or a tuple, list or dict of such, all with rows first.
Tensors = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the function that a job names as its model returns."""

    #: Each builds one layer when it is called. Of an `nn.Sequential`, which is built whole wherever
    #: it is needed, each child is a layer.
    layers: Sequence[Callable[[], nn.Module]] | nn.Sequential
    #: (output of the last layer, targets) to one number per row, (rows,). Their mean over the
    #: global batch is what is trained.
    loss: Callable[[Tensors, Tensors], Tensor]
    #: Pairs of parameters that are one and the same, each by layer and name, such as
    #: ("0.weight", "5.projection.weight"): one in the first layer and one in the last. Both are
    #: trained by the sum of their gradients. Those within one layer need no word.
    tied: Sequence[tuple[str, str]] = ()
    #: (output, targets) to named numbers per row, (rows,) each: their means over the samples are
    #: told with every evaluation, beside the loss.
    metrics: Callable[[Tensors, Tensors], Mapping[str, Tensor]] | None = field(default=None)

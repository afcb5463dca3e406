"""The built-in model's layers as a user would bring them, to see what that costs."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.core.job.model import ModelSpec
from oobleck.model import Model
from oobleck.worker.models.base import Layer
from oobleck.worker.models.gpt import Block, Embedding, Head


class Plain(nn.Module):
    """A layer of the built-in model, as a module of torch."""

    def __init__(self, build: Callable[[], Layer]) -> None:
        super().__init__()
        self.inner = build()
        for parameter in self.inner.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner.compute(x)
        return found


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    found = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return found.view(targets.shape).mean(dim=1)


def gpt(layers: int, hidden: int, heads: int, sequence_length: int) -> Model:
    spec = ModelSpec(
        layers=layers, hidden=hidden, heads=heads, sequence_length=sequence_length, tied=False
    )
    kinds = [Embedding, *[Block] * layers, Head]
    return Model(
        layers=[partial(Plain, partial(kind, spec, n)) for n, kind in enumerate(kinds)], loss=loss
    )

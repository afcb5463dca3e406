"""Model whose layers have a fixed time and size of state, however many processes share a core.

So a cluster on a machine with few cores steps like one on as many hosts.
"""

import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model


class _Sleep(torch.autograd.Function):
    """Function that takes a fixed time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Slept(nn.Module):
    """A layer of `parameters` parameters that takes `seconds` forward and twice that backward."""

    def __init__(self, width: int, parameters: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.randn(parameters // width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x, self.seconds)  # type: ignore[no-untyped-call]  # torch's
        return slept + self.weight[: x.shape[1]]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(dim=1)


def slept(layers: int, width: int, parameters: int, seconds: float) -> Model:
    return Model(
        layers=[
            partial(nn.Embedding, 256, width),
            *[partial(Slept, width, parameters, seconds)] * layers,
            partial(nn.Linear, width, 256),
        ],
        loss=loss,
    )

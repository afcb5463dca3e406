"""A model that warms up by the step, with an orthogonal layer; and its data."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from oobleck.model import Model, step

WIDTH = 6


class Points:
    def __init__(self, size: int = 96) -> None:
        draws = torch.Generator().manual_seed(5)
        self.points = torch.randn(size, WIDTH, generator=draws)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        return point, point.sum().sin()


class Warmed(nn.Module):
    """Its inner layer comes in over four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + min(1.0, step() / 4) * self.inner(x).tanh()


def turned() -> nn.Module:
    return orthogonal(nn.Linear(WIDTH, WIDTH), use_trivialization=False)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Counts more with every step until the sixth."""
    return min(1.0, step() / 6) * (output[:, 0] - targets) ** 2


def metrics(output: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"step": torch.full((len(output),), float(step()))}


def warmed() -> Model:
    layers = [Warmed, turned, Warmed, turned, partial(nn.Linear, WIDTH, 1)]
    return Model(layers=layers, loss=loss, metrics=metrics)

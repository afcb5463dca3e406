"""Layers as users write them, some of which torch's compiler takes; for tests.

What runs as it is leaves a line in the file `noted`, if there is one: compiled code does not, since
the line depends on what is known when it is compiled.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

WIDTH = 8


class Points:
    def __init__(self, size: int = 64) -> None:
        self.points = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.points[index].square().sum()


class Gate(nn.Module):
    def __init__(self, noted: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.noted = noted

    def forward(self, x: Tensor) -> Tensor:
        if self.noted and not torch.compiler.is_compiling():
            with open(self.noted, "a") as file:
                print(torch.is_grad_enabled(), x.requires_grad, file=file)
        return x + torch.tanh(self.linear(x) * self.scale) * torch.sigmoid(x)


class Turned(Gate):
    """Gives its columns in another order of memory than what has travelled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class Chooses(nn.Module):
    """By what is in it, so that there is no one code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if bool((x < 1e6).all()) else x


class Powers(nn.Module):
    """By a number of its own."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + 0.1 * x**self.power


class Attends(nn.Module):
    """Over its columns."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows = (x * self.weight).view(len(x), 1, WIDTH, 1)
        share = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=share)
        return x + mixed.view(x.shape)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)).squeeze(1)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="none")


def mixed(noted: str = "") -> Model:
    """Four layers that are compiled, two of one code, and two that are not."""
    gate = partial(Gate, noted)
    return Model(layers=[gate, partial(Turned, noted), gate, gate, Chooses, Last], loss=loss)


def alike(noted: str = "") -> Model:
    """As `mixed`, of fewer codes."""
    gate = partial(Gate, noted)
    return Model(layers=[gate, gate, gate, gate, Chooses, Last], loss=loss)


def kinds() -> Model:
    powers = [partial(Powers, power) for power in (2, 3, 2)]
    attends = [partial(Attends, dropout) for dropout in (0.0, 0.1)]
    return Model(layers=[Gate, *powers, *attends, Chooses, Last], loss=loss)


def numbered(count: int = 20) -> Model:
    """Each layer has code of its own."""
    return Model(layers=[*(partial(Powers, n) for n in range(2, count + 2)), Last], loss=loss)

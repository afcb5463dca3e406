"""A model, its data and its loss: replace them by yours.

This example has points on two spirals, and the model predicts the spiral of each.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from oobleck.model import Model


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    """`size` points, and the spiral of each. Any class with __len__ and __getitem__ works."""

    def __init__(self, size: int = 4096, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        turn = 4 + 8 * torch.rand(size, generator=draws)
        self.spiral = torch.randint(2, (size,), generator=draws)
        angle = turn + torch.pi * self.spiral
        points = torch.stack([angle.cos(), angle.sin()], dim=1) * turn[:, None] / 12
        self.points = points + 0.07 * torch.randn(size, 2, generator=draws)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.spiral[index]


class Block(nn.Module):
    """Layer whose input is the output of the layer before.

    Rows must be independent, so there is no batch norm.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return out


def loss(scores: Tensor, spiral: Tensor) -> Tensor:
    """Return one number per row, (rows,); training lowers their mean over the global batch."""
    return F.cross_entropy(scores, spiral, reduction="none")


def metrics(scores: Tensor, spiral: Tensor) -> dict[str, Tensor]:
    """Return one number per row for each metric; every evaluation reports their means."""
    return {"accuracy": (scores.argmax(dim=1) == spiral).float()}


def model(width: int = 32, blocks: int = 4) -> Model:
    """Return the model.

    Oobleck puts its layers on workers; each builds only those that it holds.
    """
    return Model(
        layers=[
            partial(nn.Linear, 2, width),
            *[partial(Block, width)] * blocks,
            partial(nn.Linear, width, 2),
        ],
        loss=loss,
        metrics=metrics,
    )

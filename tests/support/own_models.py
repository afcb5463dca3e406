"""Models and data sets as users write them, for tests."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

WIDTH, WORDS = 12, 24


class Pairs:
    """Samples with several tensors: words with a mask, and a number for each sentence."""

    def __init__(self, size: int = 96, length: int = 6) -> None:
        draws = torch.Generator().manual_seed(3)
        self.words = torch.randint(WORDS, (size, length), generator=draws)
        self.mask = torch.rand(size, length, generator=draws) < 0.8
        self.scores = torch.randn(size, generator=draws)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"words": self.words[index], "mask": self.mask[index]}, self.scores[index]


class Take(nn.Module):
    """From a dict to a tuple: floats, and the mask, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("places", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.embedding(x["words"]) + self.places, x["mask"]


class Mix(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = x
        mean = (hidden * mask.unsqueeze(-1)).mean(dim=1, keepdim=True)
        return hidden + self.drop(self.inner(self.norm(hidden + mean))), mask


class Pool(nn.Module):
    """Without a parameter."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        hidden, mask = x
        return (hidden * mask.unsqueeze(-1)).sum(dim=1)


class Score(nn.Module):
    """One number per row; `words` is the embedding of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.zeros(WORDS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.words.t()).logsumexp(dim=1)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="none")


def pairs(dropout: float = 0.0) -> Model:
    return Model(
        layers=[Take, partial(Mix, dropout), partial(Mix, dropout), Pool, Score],
        loss=loss,
        tied=[("0.embedding.weight", "4.words")],
    )


def crossed() -> Model:
    """Four sets of parameters that layers share: the ends, three layers two of them, two layers."""
    return Model(
        layers=[Take, *[Mix] * 5, Pool, Score],
        loss=loss,
        tied=[
            ("7.words", "0.embedding.weight"),
            ("1.inner.0.weight", "3.inner.0.weight"),
            ("5.inner.0.weight", "3.inner.0.weight"),
            ("3.inner.0.bias", "1.inner.0.bias"),
            ("1.inner.0.bias", "5.inner.0.bias"),
            ("5.inner.2.weight", "1.inner.2.weight"),
            ("-5.inner.2.weight", "5.inner.2.weight"),
            ("4.inner.0.weight", "2.inner.0.weight"),
        ],
    )


def twins() -> Model:
    """All that the two layers have is the same: a matrix of 9 numbers and a vector."""
    return Model(
        layers=[partial(nn.Linear, 3, 3)] * 2,
        loss=lambda output, targets: (output - targets).square().mean(dim=1),
        tied=[("0.weight", "1.weight"), ("0.bias", "1.bias")],
    )


def both_ways() -> Model:
    """One layer shares with two others, another parameter with each."""
    return Model(
        layers=[Take, Mix, Mix, Mix, Pool, Score],
        loss=loss,
        tied=[
            ("1.inner.0.weight", "2.inner.0.weight"),
            ("1.inner.2.weight", "3.inner.2.weight"),
        ],
    )


class Project(nn.Module):
    """Through a fixed matrix, as random features are."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = x
        return hidden + self.scale * torch.tanh(hidden @ self.table), mask


def projected() -> Model:
    """The function draws what a layer is built with."""
    table = torch.randn(WIDTH, WIDTH)
    return Model(layers=[Take, partial(Project, table), Mix, Pool, Score], loss=loss)


def sequence() -> Model:
    """As an nn.Sequential, for `Pairs` without its mask."""
    return Model(
        layers=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)),
        loss=loss,
    )


class Points:
    def __init__(self, size: int = 64) -> None:
        draws = torch.Generator().manual_seed(5)
        self.points = torch.randn(size, 4, generator=draws)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        point = self.points[index]
        return point.numpy(), float(point.sum())

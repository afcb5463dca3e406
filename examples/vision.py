"""A vision transformer, and images to try it on: which quarter of each is the bright one?

python vision.py FOLDER    # draws FOLDER/images.npy and FOLDER/labels.npy
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

SIDE, PATCH, CHANNELS, CLASSES = 16, 4, 3, 4


class Patches(nn.Module):
    """Images (rows, channels, side, side) to patches (rows, patches, width), and their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(CHANNELS, width, kernel_size=PATCH, stride=PATCH)
        self.place = nn.Parameter(0.5 * torch.randn((SIDE // PATCH) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.cut(images).flatten(2).transpose(1, 2) + self.place
        return out


class Head(nn.Module):
    """The mean over the patches to a score per class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scores(self.norm(x).mean(dim=1))
        return out


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return one number per image, (rows,)."""
    return F.cross_entropy(scores, labels, reduction="none")


def metrics(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (scores.argmax(dim=1) == labels).float()}


def vit(width: int = 32, blocks: int = 4, heads: int = 4, dropout: float = 0.1) -> Model:
    block = partial(
        nn.TransformerEncoderLayer,
        width,
        heads,
        dim_feedforward=4 * width,
        dropout=dropout,
        batch_first=True,
        norm_first=True,
    )
    return Model(
        layers=[partial(Patches, width), *[block] * blocks, partial(Head, width)],
        loss=loss,
        metrics=metrics,
    )


def draw(folder: Path, size: int = 2048, seed: int = 0) -> None:
    """`size` images of noise with one quarter brighter than the rest, and which one it is."""
    draws = np.random.default_rng(seed)
    images = draws.normal(size=(size, CHANNELS, SIDE, SIDE)).astype(np.float32)
    labels = draws.integers(CLASSES, size=size)
    half = SIDE // 2
    for image, label in zip(images, labels, strict=True):
        top, left = half * (label // 2), half * (label % 2)
        image[:, top : top + half, left : left + half] += 1.0
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python vision.py FOLDER, where images.npy and labels.npy shall be")
    draw(Path(sys.argv[1]))

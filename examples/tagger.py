"""A part-of-speech tagger in miniature: your own model, data set and loss.

Words are numbers. A word's tag follows from the word and from the one before it, so that the model
has to look at its neighbours; the data set draws sentences and tags them by that rule.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from oobleck.model import Model

WORDS, TAGS = 64, 8


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """`size` sentences of `length` words, and the tag of each word."""

    def __init__(self, size: int = 4096, length: int = 16, seed: int = 0) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (size, length), generator=draws)
        before = F.pad(self.words[:, :-1], (1, 0))
        self.tags = (self.words + 3 * before) % TAGS

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.tags[index]


class Block(nn.Module):
    """A convolution over neighbours, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, 2 * width, kernel_size=3, padding=1)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.out(F.gelu(mixed))
        return out


def loss(scores: Tensor, tags: Tensor) -> Tensor:
    """Return one number per sentence, (rows,)."""
    return F.cross_entropy(scores.transpose(1, 2), tags, reduction="none").mean(dim=1)


def metrics(scores: Tensor, tags: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (scores.argmax(dim=2) == tags).float().mean(dim=1)}


def tagger(width: int = 32, blocks: int = 4) -> Model:
    return Model(
        layers=[
            partial(nn.Embedding, WORDS, width),
            *[partial(Block, width)] * blocks,
            partial(nn.Linear, width, TAGS),
        ],
        loss=loss,
        metrics=metrics,
    )

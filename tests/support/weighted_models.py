"""A tagger of words as users write it, whose loss weighs tags: many words have none."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model
from oobleck.worker.data.objective import Order

WIDTH, WORDS, TAGS, LENGTH = 8, 20, 5, 6
#: Of words without a tag.
IGNORED = -100
BATCH, SEED = 12, 7
#: The step of a job whose samples have no tag at all.
EMPTY_STEP = 3
#: What a tag weighs, none of which a float has exactly.
SHARES = (0.1, 0.7, 1.3, 2.1, 0.4)


class Tagged:
    """Sentences with a tag for some of their words: for one, for all, for none."""

    def __init__(self, size: int = 84, seed: int = 3, empty_step: int = EMPTY_STEP) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (size, LENGTH), generator=draws)
        tags = torch.randint(TAGS, (size, LENGTH), generator=draws)
        known = torch.rand(size, LENGTH, generator=draws) < torch.rand(size, 1, generator=draws)
        known[::9], known[4::9] = False, True
        if empty_step:
            order = Order.of(size, 0.0).of_step(SEED, empty_step, range(BATCH), BATCH)
            known[[int(number) for number in order]] = False
        self.tags = tags.where(known, IGNORED)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.words[index], self.tags[index]


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x + x.mean(dim=1, keepdim=True))))


def loss(scores: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
    shares = scores.new_tensor(SHARES)
    sums = F.cross_entropy(
        scores.transpose(1, 2), tags, weight=shares, ignore_index=IGNORED, reduction="none"
    )
    known = tags != IGNORED
    return sums.sum(dim=1), (shares[tags.where(known, 0)] * known).sum(dim=1)


def tagger(blocks: int = 2) -> Model:
    return Model(
        layers=[
            partial(nn.Embedding, WORDS, WIDTH),
            *[Mix] * blocks,
            partial(nn.Linear, WIDTH, TAGS),
        ],
        loss=loss,
    )

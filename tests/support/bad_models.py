"""Models and data sets as users write them, good and bad: what `oobleck check` says of each is in
tests/worker/models/test_check.py.

Samples are eight numbers and a class. Every model begins with a linear layer of `WIDTH`.
"""

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import Dataset

from oobleck.model import Model

FEATURES, WIDTH, CLASSES = 8, 8, 4


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int = 64) -> None:
        self.points = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], torch.tensor(index % CLASSES)


class Labels(Points):
    """Good samples of another form."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index)[::-1]


class Jittered(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = super().__getitem__(index)
        return point + torch.rand(()), label


class Flipped(Points):
    """Of each sample one of two: by chance both reads are alike."""

    def __init__(self) -> None:
        super().__init__()
        self._coin = random.Random(0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = super().__getitem__(index)
        return point if self._coin.random() < 0.5 else -point, label


class Padded(Points):
    """Tokens from 1, how many of them count, and a class from 1."""

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.arange(index, index + FEATURES) % CLASSES + 1
        return {"tokens": tokens, "length": tokens[0]}, tokens[0]


class Ragged(Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, label = super().__getitem__(index)
        return point[: FEATURES - (index == 63)], label


class Boastful(Points):
    """Has fewer samples than it says."""

    def __len__(self) -> int:
        return super().__len__() + 1


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none")


class Residual(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = inner or nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x))
        return out


def around(*middle: Callable[[], nn.Module], **others: Any) -> Model:
    """A model with these layers in the middle."""
    ends = partial(nn.Linear, FEATURES, WIDTH), partial(nn.Linear, WIDTH, CLASSES)
    return Model(layers=[ends[0], *middle, ends[1]], **{"loss": loss, **others})


# Good ones.


class ToDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "parts": (self.gate(x), (x > 0).sum(1))}


class FromDict(nn.Module):
    def forward(self, given: Mapping[str, Any]) -> Tensor:
        gate, positive = given["parts"]
        out: Tensor = given["x"] * gate + positive[:, None]
        return out


def plain() -> Model:
    return around(Residual, Residual, metrics=accuracy)


def accuracy(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"accuracy": (scores.argmax(1) == labels).float()}


def dicts() -> Model:
    return around(ToDict, FromDict)


def dropout() -> Model:
    return around(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))


class Encoder(nn.TransformerEncoderLayer):
    """Two tokens of a row."""

    def __init__(self) -> None:
        super().__init__(WIDTH // 2, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unflatten(1, (2, WIDTH // 2))).flatten(1)


def encoder() -> Model:
    return around(Encoder, Encoder)


def sequential() -> Model:
    whole = nn.Sequential(nn.Linear(FEATURES, WIDTH), Residual(), nn.Linear(WIDTH, CLASSES))
    return Model(layers=whole, loss=loss)


def tied() -> Model:
    square = partial(nn.Linear, FEATURES, FEATURES)
    return Model(layers=[square, Residual, square], loss=loss, tied=[("0.weight", "2.weight")])


def frozen() -> Model:
    return around(lambda: Residual(nn.Linear(WIDTH, WIDTH).requires_grad_(False)))


class Recurrent(nn.Module):
    """Passes the lengths on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = given["x"] if "x" in given else self.table(given["tokens"] - 1)
        packed = pack_padded_sequence(x, given["length"], batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=FEATURES)
        return {"x": y, "length": given["length"]}


class LastState(nn.Linear):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        last = given["length"].view(-1, 1, 1) - 1
        return super().forward(given["x"].take_along_dim(last, 1).squeeze(1))


def recurrent() -> Model:
    return Model(
        layers=[Recurrent, Recurrent, partial(LastState, WIDTH, CLASSES)],
        loss=lambda scores, labels: loss(scores, labels - 1),
    )


# Bad ones.


def batch_norm() -> Model:
    return around(partial(nn.BatchNorm1d, WIDTH, track_running_stats=False))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def centred() -> Model:
    return around(Centred)


class Averaged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / len(x)


def averaged() -> Model:
    return around(Averaged)


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand())


def numpy_noise() -> Model:
    return around(NumpyNoise)


class LayerDrop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.0 else 2 * x


def layer_drop() -> Model:
    return around(LayerDrop)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return x
        return x + torch.rand(x.shape, generator=self.draws, device="cpu")


def own_generator() -> Model:
    return around(OwnGenerator)


class AlwaysDrops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def always_drops() -> Model:
    return around(AlwaysDrops)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def in_place() -> Model:
    return around(lambda: nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)))


def writes_the_data() -> Model:
    return Model(layers=[InPlace, partial(nn.Linear, FEATURES, CLASSES)], loss=loss)


class Differentiates(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(
            torch.func.grad(lambda row: super(Differentiates, self).forward(row).sum())
        )(x)


def differentiates() -> Model:
    return around(partial(Differentiates, WIDTH, WIDTH))


class Counted(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def counted() -> Model:
    return around(Counted)


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.zeros_like(x)


def infinite() -> Model:
    return around(Infinite)


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("there is no way back")


class NoWayBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _NoWayBack.apply(x)
        return out


def no_way_back() -> Model:
    return around(NoWayBack)


class FailsInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise KeyError("predict")
        return x


def fails_in_evaluation() -> Model:
    return around(FailsInEvaluation)


class Narrower(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x.half()


def other_in_evaluation() -> Model:
    return around(Narrower)


def one_module() -> Model:
    block = Residual()
    return around(lambda: block, lambda: block)


def borrowed() -> Model:
    weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def build() -> nn.Module:
        made = nn.Linear(WIDTH, WIDTH)
        made.weight = weight
        return made

    return around(build, build)


def same_child() -> Model:
    block = Residual()
    ends = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    return Model(layers=nn.Sequential(ends[0], block, block, ends[1]), loss=loss)


def untied() -> Model:
    first, last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    last.weight = first.weight
    return Model(layers=nn.Sequential(first, Residual(), last), loss=loss)


class Table(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table.to(x.device)


def early_table() -> Model:
    return around(partial(Table, torch.ones(WIDTH)))


def nothing_trained() -> Model:
    return Model(layers=[partial(_frozen, FEATURES, CLASSES)], loss=loss)


def _frozen(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs).requires_grad_(False)


class Chosen(nn.Module):
    """As many rows as numbers of its input allow."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0]


def chosen() -> Model:
    return around(Chosen)


class Wider(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if bool((x >= 0).all()) else x.double()


def wider() -> Model:
    return around(Wider)


def misfit() -> Model:
    return around(partial(nn.Linear, WIDTH, WIDTH + 1), Residual)


def hidden() -> Model:
    """A layer gives what is no tensor."""
    return around(Hidden)


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, None


def mean_loss() -> Model:
    return around(loss=F.cross_entropy)


def contrastive() -> Model:
    return around(loss=lambda scores, labels: loss(scores - scores.mean(0), labels))


def counts_as_loss() -> Model:
    return around(loss=lambda scores, labels: (scores.argmax(1) != labels).float())


def weighted() -> Model:
    return around(loss=lambda scores, labels: (loss(scores, labels), labels % 3))


def trained_weights() -> Model:
    return around(loss=lambda scores, labels: (loss(scores, labels), scores.square().sum(1)))


def negative_weights() -> Model:
    return around(loss=lambda scores, labels: (loss(scores, labels), labels - 1000))


def common_weights() -> Model:
    return around(loss=lambda scores, labels: (loss(scores, labels), labels + labels.sum()))


def one_weight() -> Model:
    return around(loss=lambda scores, labels: (loss(scores, labels), torch.ones(())))


def noisy_loss() -> Model:
    return around(loss=lambda scores, labels: loss(scores + torch.rand_like(scores), labels))


def failing_loss() -> Model:
    return around(loss=lambda scores, labels: loss(scores, labels["class"]))


def list_of_metrics() -> Model:
    return around(metrics=lambda scores, labels: [loss(scores, labels)])


def hostile_metric() -> Model:
    return around(metrics=lambda scores, labels: {"a\nb": loss(scores, labels)})


def mean_metric() -> Model:
    return around(metrics=lambda scores, labels: {"error": loss(scores, labels).mean()})


def ranked_metric() -> Model:
    return around(metrics=lambda scores, labels: {"rank": scores[:, 0] - scores[:, 0].mean()})


def unknown_metric() -> Model:
    return around(metrics=lambda scores, labels: {"error": loss(scores, labels) * float("nan")})


def quits() -> Model:
    sys.exit("I leave")


# What goes well for a while, so that only workers see it fail. Each process counts for itself.


class Patience:
    def __init__(self, most: int) -> None:
        self._left = most

    def lose(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("tired\nof it")


_patience = {"layer": Patience(60), "backward": Patience(60), "loss": Patience(60)}


class _Tiring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _patience["backward"].lose()
        return gradient


class Tired(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "backward":
            out: Tensor = _Tiring.apply(x)
            return out
        if self.where == "layer":
            _patience["layer"].lose()
        return x


def _tired_loss(where: str, scores: Tensor, labels: Tensor) -> Tensor:
    if where == "loss":
        _patience["loss"].lose()
    return loss(scores, labels)


def tiring(where: str) -> Model:
    return around(partial(Tired, where), loss=partial(_tired_loss, where))


class Exhausted(Points):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._patience = Patience(200 if where == "data" else 1 << 30)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._patience.lose()
        return super().__getitem__(index)

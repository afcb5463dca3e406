"""Models of users whose rows influence each other where initial weights do not show it, that count
their calls, or that torch builds in a way of its own; and good ones that look alike.

What `oobleck check` says of each is in tests/worker/models/test_influence.py.
"""

import random
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from oobleck.model import Model, step
from support.bad_models import CLASSES, FEATURES, WIDTH, Residual, around, loss


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Six token ids of sixteen, and a class."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(6) * (index + 1) % 16
        return ids, torch.tensor(index % CLASSES)


# Rows that influence each other.


class Gated(nn.Module):
    """As ReZero: the other rows come in through a gate that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        out: Tensor = x + self.gate * (h - h.mean(0))
        return out


class Modulated(nn.Module):
    """As adaLN-Zero, over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gates(x) * (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        return out


class Branch(nn.Module):
    """Goes another way where the batch's mean is positive."""

    def __init__(self, edge: float = 0.2) -> None:
        super().__init__()
        self.edge = edge

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.mean() > self.edge else x


class GatedByCount(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.inner(x) / len(x)


class Summed(nn.Module):
    """Row 0 does not depend on the others, and they depend on it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0)


class SummedIds(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1).cumsum(0)


class Backwards(nn.Module):
    """Its forward is right, and its backward takes the mean over rows away."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient - gradient.mean(0))
        return x


class Leaned(torch.autograd.Function):
    """What a row adds to the weight's gradient depends on the largest number of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0) / x.abs().max()


class Leaning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Leaned.apply(x, self.weight)
        return out


class CentredInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x - x.mean(0)


class ByPlace(nn.Module):
    """Adds numbers by the row's place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(64, WIDTH).cumsum(0) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: len(x)]


class ByPlaceLater(ByPlace):
    """Its numbers are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.table)


class ByPlaceAndDraws(ByPlaceLater):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class CentredIfMany(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) >= 4 else x


class Averaged(torch.autograd.Function):
    """Its forward is right, and its backward divides by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / len(gradient)


class Averages(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Averaged.apply(x)
        return out


class AveragesAndDraws(Averages):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class CountsInEvaluation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x / len(x)


class GatedInEvaluation(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * (x if self.training else x - x.mean(0))


class Warmed(nn.Module):
    """Takes the batch's mean away in later steps."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if step() > 5 else x


class Router(nn.Linear):
    """A balancing loss of means over the batch travels along."""

    def __init__(self, wide: bool = True) -> None:
        super().__init__(WIDTH, 4)
        self.wide = wide

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        balance = (super().forward(x).softmax(-1).mean(0) ** 2).sum()
        return {"x": x, "balance": balance.expand(len(x)) if self.wide else balance}


class Scores(nn.Linear):
    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**given, "x": super().forward(given["x"])}


def named_layer(name: str) -> Model:
    """One of the classes here in the middle."""
    return around(globals()[name])


def named_loss(name: str) -> Model:
    """The loss, by the place or the number of rows."""

    def place(scores: Tensor, labels: Tensor) -> Tensor:
        return loss(scores, labels) * (1 + 0.1 * torch.arange(len(scores)))

    def many(scores: Tensor, labels: Tensor) -> Tensor:
        return loss(scores, labels) * (2 if len(scores) >= 4 else 1)

    def weight(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss(scores, labels), 1 + torch.arange(len(scores))

    def warmed(scores: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(len(scores)) * (step() > 5)
        return loss(scores, labels) * (1 + 0.1 * places)

    return around(loss={"place": place, "many": many, "weight": weight, "warmed": warmed}[name])


class Signed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sign()


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Signed.apply(x)
        return out


class Hooked(nn.Linear):
    """A hook of its output, which is not a parameter."""

    def __init__(self, limit: float | None = 0.05) -> None:
        super().__init__(WIDTH, WIDTH)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if h.requires_grad:
            limit = self.limit
            h.register_hook(lambda g: g * 0.5 if limit is None else g.clamp(-limit, limit))
        return h


def hooked(layer: str, *, weighed: bool, **arguments: Any) -> Model:
    def of(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return loss(scores, labels), labels + 1.0

    return around(partial(globals()[layer], **arguments), loss=of if weighed else loss)


def summed_ids() -> Model:
    return Model(layers=[partial(SummedIds, 16, WIDTH), Last], loss=loss)


def balanced(wide: bool = True) -> Model:
    def of(output: dict[str, Tensor], labels: Tensor) -> Tensor:
        return loss(output["x"], labels) + output["balance"]

    return Model(
        layers=[
            partial(nn.Linear, FEATURES, WIDTH),
            partial(Router, wide),
            partial(Scores, WIDTH, CLASSES),
        ],
        loss=of,
    )


def balanced_in_loss() -> Model:
    def of(scores: Tensor, labels: Tensor) -> Tensor:
        return loss(scores, labels) + (scores.softmax(-1).mean(0) ** 2).sum()

    return around(loss=of)


def branch_in_loss() -> Model:
    """Softens where any score of the batch is large."""

    def of(scores: Tensor, labels: Tensor) -> Tensor:
        return loss(scores / 2 if scores.abs().max() > 1.5 else scores, labels)

    return around(loss=of)


def warmed_loss() -> Model:
    """Gets a term over the batch in later steps."""

    def of(scores: Tensor, labels: Tensor) -> Tensor:
        found = loss(scores, labels)
        return found + found.mean() if step() > 5 else found

    return around(loss=of)


def weights_of_rows(how: str) -> Model:
    """Rows weigh what the batch says: behind a branch, or in later steps."""

    def of(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        sizes = scores.detach().abs()
        shared = sizes.max() > 1.5 if how == "branch" else step() > 5
        weights = labels + 1.0
        return loss(scores, labels), weights + sizes.mean() if shared else weights

    return around(loss=of)


# Layers that keep something from call to call.


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2 if self.calls > 7 else x


class CountsCallsOfAView(CountsCalls):
    """And goes on with the weight that it was built with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept = self.scale.data

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * self.kept


class KeepsMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().mean()))
        return x


_calls = {"all": 0}


class CountsInFile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        _calls["all"] += 1
        return x


def counting_loss() -> Model:
    calls = 0

    def of(scores: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(scores, labels) * min(1.0, calls / 100)

    return around(loss=of)


class Rotary(nn.Module):
    """A table that is made for the length which is met, and notes what was seen last."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).sin()
            self.tables[x.shape[1]] = self.table
        self.last = x.detach()
        return x * self.table


# Good ones.


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES)


class Tokens(nn.Embedding):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"x": super().forward(ids), "mask": ids > 3, "ids": ids}


class Experts(nn.Module):
    """Each token to the likelier of two experts, with those of other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = given["x"].flatten(0, 1)
        share, expert = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, one in enumerate(self.experts):
            places = (expert == number).nonzero().squeeze(1)
            if len(places):
                out = out.index_add(0, places, share[places, None] * one(x[places]))
        return {**given, "x": given["x"] + out.view_as(given["x"])}


class Attention(nn.Module):
    """Over a row's tokens, with keys that a mask leaves out, and computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        def inner(x: Tensor) -> Tensor:
            x = self.norm(x)
            out: Tensor = self.inner(x, x, x, key_padding_mask=given["mask"], need_weights=False)[0]
            return out

        x = (
            checkpoint(inner, given["x"], use_reentrant=True)
            if self.training
            else inner(given["x"])
        )
        return {**given, "x": given["x"] + x}


class Pooled(nn.Linear):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return super().forward(given["x"].mean(1))


def experts() -> Model:
    layers = [partial(Tokens, 16, WIDTH), Experts, Attention, Experts]
    return Model(layers=[*layers, partial(Pooled, WIDTH, CLASSES)], loss=loss)


class Shares(nn.Linear):
    """Its logarithm takes shares alone, and its scale must be positive."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        shares = super().forward(x).softmax(-1)
        return shares.log() * self.scale.log()


class Steep(nn.Linear):
    """Not finite where its weights are a little larger."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        nn.init.constant_(self.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return (80 * super().forward(x.tanh()).tanh()).exp()


class Recurrent(nn.Module):
    """Chaotic once its weights are a little larger: rounding grows from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Linear(WIDTH, 64)
        self.inner = nn.Linear(64, 64, bias=False)
        nn.init.orthogonal_(self.inner.weight, gain=1.2)
        self.given_back = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.given(x)
        for _ in range(400):
            hidden = self.inner(hidden).tanh()
        out: Tensor = self.given_back(hidden)
        return out


class Picky(nn.Module):
    """Raises where a number is not what it expects."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 20).any()):
            raise ValueError("that large?")
        return torch.distributions.Normal(x, F.softplus(x) + 0.1).mean


class Masked(nn.Module):
    """A mask of floats, of which some are minus infinity, travels along."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.zeros_like(x).masked_fill(x > 0.5, -torch.inf)


class MaskedSoftmax(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = given
        return (
            x
            + (torch.cat([x, x], 1) + torch.cat([mask, mask * 0], 1).nan_to_num(0)).softmax(1)[
                :, :WIDTH
            ]
        )


def masked() -> Model:
    return around(Masked, MaskedSoftmax)


class Choice(nn.Module):
    """Integers and truths travel along."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.argmax(1), x > 0


class Chosen(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, best, positive = given
        return x.scatter(1, best[:, None], 0.0) * positive


def choice() -> Model:
    return around(Choice, Chosen)


class WarmedUp(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return x + min(1.0, step() / 4) * self.inner(self.norm(x))


def by_step(**others: Any) -> Model:
    """Warms up a layer, its loss and a metric by the step."""

    def of(scores: Tensor, labels: Tensor) -> Tensor:
        return loss(scores, labels) * min(1.0, step() / 6)

    def metrics(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"step": torch.full((len(scores),), float(step()))}

    return around(WarmedUp, WarmedUp, **{"loss": of, "metrics": metrics, **others})


class WarmedBackwards(nn.Module):
    """Asks for the step in its backward, where another thread may run it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * step())
        return x


class Parts(nn.Module):
    """Its weights are rows, and columns, of one tensor each."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = torch.randn(2 * WIDTH, WIDTH), torch.randn(WIDTH, 2 * WIDTH)
        self.query, self.key = nn.Parameter(rows[:WIDTH]), nn.Parameter(rows[WIDTH:])
        self.up, self.down = nn.Parameter(columns[:, :WIDTH]), nn.Parameter(columns[:, WIDTH:])

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.query).tanh() @ self.key + (x @ self.up).tanh() @ self.down


class Scale(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.scale
        return out


def parts_of_layers(overlap: int = 0) -> Model:
    """The scales of two layers are parts of one tensor."""
    scales = torch.ones(2 * WIDTH - overlap)
    ends = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    middle = Scale(scales[:WIDTH]), Scale(scales[-WIDTH:])
    return Model(layers=nn.Sequential(ends[0], *middle, ends[1]), loss=loss)


class Draws(nn.Module):
    """Has a number of Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.number = random.random()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


def drawn_in_sequence() -> Model:
    ends = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
    return Model(layers=nn.Sequential(Draws(), ends[0], Draws(), ends[1]), loss=loss)


# Weights in the memory of others.


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight.data = self.a.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).tanh())


class Overlapping(Parts):
    """Some columns are in both of its weights."""

    def __init__(self) -> None:
        super().__init__()
        columns = torch.randn(WIDTH, 2 * WIDTH)
        self.up = nn.Parameter(columns[:, :WIDTH])
        self.down = nn.Parameter(columns[:, WIDTH - 1 : -1])


# As torch builds them.


def orthogonal(**options: Any) -> Model:
    return around(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), **options))


def weight_norm() -> Model:
    return around(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def lazy() -> Model:
    return around(lambda: nn.Sequential(nn.LazyLinear(WIDTH)))


class SparseTokens(nn.Module):
    def __init__(self, bag: bool) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(16, WIDTH, sparse=True)
        self.bag = bag

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids)
        return out if self.bag else out.mean(1)


def sparse(bag: bool = False) -> Model:
    return Model(layers=[partial(SparseTokens, bag), Last], loss=loss)


def quantised() -> Model:
    from torch.ao.nn.quantized import Linear

    return around(partial(Linear, WIDTH, WIDTH))


def quantised_dynamically() -> Model:
    from torch.ao.quantization import quantize_dynamic

    return around(lambda: quantize_dynamic(nn.Sequential(nn.Linear(WIDTH, WIDTH))))


def quantisation_aware() -> Model:
    from torch.ao.nn.qat import Linear
    from torch.ao.quantization import get_default_qat_qconfig

    return around(lambda: Linear(WIDTH, WIDTH, qconfig=get_default_qat_qconfig()))


def prepared_for_quantisation() -> Model:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        made.qconfig = get_default_qat_qconfig()  # type: ignore[assignment]  # torch reads it there
        return prepare_qat(made)

    return around(build)


def in_dtype(dtype: str) -> Model:
    return around(partial(nn.Linear, WIDTH, WIDTH, dtype=getattr(torch, dtype)))

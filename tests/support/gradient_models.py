"""Models of users who change gradients, keep weights beside their modules, or leave weights unused.

Each is a few small layers; `Keyed` is the data of all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model

WIDTH, WORDS, EXPERTS = 8, 12, 3
#: Of a gradient as `hooked` clamps it: some of the numbers are above.
MOST = 0.02


class Keyed:
    """A word, two experts and a target per row; most rows want expert 0, a few the last one."""

    def __init__(self, size: int = 160) -> None:
        draws = torch.Generator().manual_seed(5)
        self.words = torch.randint(WORDS, (size,), generator=draws)
        shares = torch.tensor([0.94, 0.03, 0.03])
        self.keys = torch.multinomial(shares, 2 * size, replacement=True, generator=draws)
        self.targets = torch.randn(size, generator=draws)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        keys = self.keys.view(-1, 2)[index]
        return {"words": self.words[index], "keys": keys}, self.targets[index]


def of_rows(output: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(output, targets, reduction="none")


class Words(nn.Module):
    """Looks words up; `spare` is used by nothing."""

    def __init__(self, hook: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.spare = nn.Parameter(torch.randn(3, WIDTH))
        if hook is not None:
            self.table.register_hook(hook)

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.table[x["words"]], x["keys"]


class Experts(nn.Module):
    """Each row goes through one expert, by its key; an expert without a row is not called."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = key
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, keys = x
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (keys[:, self.key] == number).nonzero().flatten()
            if len(rows):
                found = found.index_copy(0, rows, torch.tanh(expert(hidden[rows])))
        return hidden + found, keys


class Sum(nn.Module):
    """One number per row; `late` counts where a row wants the last expert, and is used there."""

    def __init__(self, hook: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.late = nn.Parameter(torch.randn(WIDTH))
        if hook is not None:
            self.table.register_hook(hook)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        hidden, keys = x
        found = (hidden @ self.table.t()).logsumexp(dim=1)
        wanted = keys[:, 0] == EXPERTS - 1
        if bool(wanted.any()):
            found = found + wanted.to(hidden.dtype) * (hidden @ self.late)
        return found


def branches() -> Model:
    """Weights that are used in some steps, in some micro-batches, in one of the layers that share
    them, or never."""
    layers = [Words, partial(Experts, 0), partial(Experts, 1), Sum]
    last = EXPERTS - 1
    tied = [(f"1.experts.{last}.{name}", f"2.experts.{last}.{name}") for name in ("weight", "bias")]
    return Model(layers=layers, loss=of_rows, tied=tied)


def first_rows_stay() -> Callable[[Tensor], Tensor]:
    """A hook that keeps the first words as they are: its mask is nobody's buffer."""
    mask = torch.ones(WORDS, 1)
    mask[: WORDS // 3] = 0
    return lambda gradient: gradient * mask.to(gradient.dtype)


class Kept(nn.Module):
    """Calls its weights by other ways than their names, and has some of their numbers stay."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.call = partial(F.linear, weight=self.inner.weight, bias=self.inner.bias)
        self.scales = [self.scale]
        outer = self.outer.weight
        self.last = lambda x: x @ outer.t() + self.outer.bias
        self.inner.weight.register_post_accumulate_grad_hook(_lower_triangle)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, keys = x
        return hidden + self.last(torch.tanh(self.call(hidden)) * self.scales[0]), keys


def _lower_triangle(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.tril_()


class Clamped(nn.Module):
    """The gradient of each micro-batch is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-MOST, MOST))

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x[0] + torch.tanh(self.linear(x[0])), x[1]


def masked() -> Model:
    """Hooks that give the same for a micro-batch in parts."""
    layers = [
        lambda: Words(first_rows_stay()),
        Kept,
        partial(Experts, 0),
        Kept,
        lambda: Sum(first_rows_stay()),
    ]
    return Model(layers=layers, loss=of_rows, tied=[("0.table", "4.table")])


def hooked() -> Model:
    """The same, and hooks that want a micro-batch as a whole."""
    made = masked()
    layers: Any = [*made.layers]
    layers[2] = Clamped
    return Model(layers=layers, loss=of_rows, tied=made.tied)


def weighed() -> Model:
    """Hooks that want the gradient as it is, and a loss whose weight is known later."""
    made = hooked()
    return Model(
        layers=made.layers,
        loss=lambda output, targets: (of_rows(output, targets), torch.ones(len(output))),
        tied=made.tied,
    )


class Hooked(nn.Module):
    """A linear layer whose weight has hooks."""

    def __init__(
        self,
        hook: Callable[[Tensor], Tensor | None] | None = None,
        after: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if hook is not None:
            self.linear.weight.register_hook(hook)
        if after is not None:
            self.linear.weight.register_post_accumulate_grad_hook(after)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x[0] + self.linear(x[0]), x[1]


def _clipped(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-MOST, MOST)


def _replaced(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.5


def _taken(parameter: Tensor) -> None:
    parameter.grad = None


@torch.no_grad()
def _descended(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.sub_(0.1 * parameter.grad)


class _Twice:
    """Scales the first gradients otherwise than those after."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient / self.calls


class HookedLate(nn.Module):
    """Has its weight's gradient clamped, from its first forward on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight
        if self.how == "before":
            weight.register_hook(lambda gradient: gradient.clamp(-MOST, MOST))
        elif self.how == "after":
            weight.register_post_accumulate_grad_hook(_clipped)
        return x[0] + self.linear(x[0]), x[1]


def hooked_late(how: str) -> Model:
    return Model(layers=[Words, partial(HookedLate, how), Sum], loss=of_rows)


class Given(nn.Module):
    """Gives a module its weight, as one of learned positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x[0] + self.norm(self.positions), x[1]


def given() -> Model:
    return Model(layers=[Words, Given, Sum], loss=of_rows)


#: By name: hooks, and whether they are given whole micro-batches; None: they are refused.
HOOKS: dict[str, tuple[Callable[[], nn.Module], bool | None]] = {
    "scaled": (lambda: Hooked(lambda gradient: gradient * 0.5), False),
    "seen": (lambda: Hooked(lambda gradient: None), False),
    "triangle": (lambda: Hooked(after=_lower_triangle), False),
    "clamped": (Clamped, True),
    "normed": (lambda: Hooked(lambda gradient: gradient / gradient.norm()), True),
    "mended": (lambda: Hooked(lambda gradient: gradient.nan_to_num()), True),
    "counted": (lambda: Hooked(_Twice()), None),
    "noisy": (lambda: Hooked(lambda g: g + 0.01 * torch.randn_like(g)), None),
    "clipped": (lambda: Hooked(after=_clipped), None),
    "replaced": (lambda: Hooked(after=_replaced), None),
    "taken": (lambda: Hooked(after=_taken), None),
    "descended": (lambda: Hooked(after=_descended), None),
}


def with_hooks(name: str) -> Model:
    return Model(layers=[Words, HOOKS[name][0], Sum], loss=of_rows)


def tied_hooks(first: str, last: str) -> Model:
    """The two layers that share a table have these hooks of it."""
    layers = [lambda: Words(_HOOKS[first]()), lambda: Sum(_HOOKS[last]())]
    return Model(layers=layers, loss=of_rows, tied=[("0.table", "1.table")])


_HOOKS: dict[str, Callable[[], Callable[[Tensor], Tensor] | None]] = {
    "mask": first_rows_stay,
    "none": lambda: None,
    "clamp": lambda: lambda gradient: gradient.clamp(-MOST, MOST),
}


class Viewed(nn.Module):
    """Keeps a tensor that was made from its weight, or a parameter where no module has it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if how == "closure":
            weight = self.linear.weight.detach()
            self.add = lambda x: x @ weight
        elif how == "attribute":
            self.rows = self.linear.weight.data[:1]
            self.add = lambda x: x * self.rows
        elif how == "buffer":
            self.register_buffer("rows", self.linear.weight.data[:1])
            self.add = lambda x: x * self.rows
        elif how == "list":
            self.scales = [nn.Parameter(torch.rand(WIDTH))]
            self.add = lambda x: x * self.scales[0]
        elif how == "hidden":
            scale = nn.Parameter(torch.rand(WIDTH))
            self.add = lambda x: x * scale

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(x[0]) + self.add(x[0]), x[1]


def viewed(how: str) -> Model:
    return Model(layers=[Words, partial(Viewed, how), Sum], loss=of_rows)

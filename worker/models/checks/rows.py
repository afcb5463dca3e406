"""Two batches that share a row, and comparisons of that row's results.

The result of the shared row must depend on that row alone. Must not know layers or losses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oobleck.worker.models.tree import Tree, flatten, map_tensors, structure, unflatten

#: Tolerances for equal sums, and for sums in another order: powers of the type's precision,
#: relative to the largest number. In float32 they are 2e-5 and 3e-4.
_EXACT, _SUMS = 2 / 3, 1 / 2
#: Factor on the numbers of other rows, so that they outweigh the shared row.
_CROWD = 3.0
#: Advice where a row's place or the number of rows matters.
ANYWHERE = (
    "workers that share a stage compute some rows each, so what becomes of a row must not depend "
    "on its place in the batch, nor on how many rows there are; compute it from that row alone, "
    "without len(x) or numbers by row"
)
#: Advice for a loss that is computed over a batch.
PER_ROW = (
    "Which rows are computed together differs from plan to plan, so compute it for each row alone: "
    "over the row's own tokens, p.mean(1) instead of p.mean(0) or p.mean(), one number per row; "
    "training takes the mean over all rows"
)


@dataclass(frozen=True, slots=True)
class Batches:
    """Two batches with the same `row`."""

    one: Tree
    other: Tree
    row: int = 0

    def alone(self) -> Tree:
        """Return the shared row as a batch of one, (1, ...)."""
        return map_tensors(lambda tensor: tensor[self.row : self.row + 1], self.one)

    def both(self) -> Tree:
        """Return one batch of the rows of `one`, then those of `other`: the shared row is at `row`
        and at `later`."""
        rows = zip(flatten(self.one), flatten(self.other), strict=True)
        joined = [leaf(torch.cat([a, b]), a.requires_grad) for a, b in rows]
        return unflatten(structure(self.one), joined)

    @property
    def later(self) -> int:
        return len(flatten(self.one)[0]) + self.row


def with_same_row(one: Tree, other: Tree, row: int = 0) -> Batches:
    """Return `one`, and `other` with its `row` replaced by that of `one`."""
    rows = zip(flatten(one), flatten(other), strict=True)
    mixed = [
        leaf(torch.cat([b[:row], a[row : row + 1], b[row + 1 :]]), a.requires_grad) for a, b in rows
    ]
    return Batches(one, unflatten(structure(other), mixed), row)


def crowded(x: Batches, sign: float) -> Tree:
    """Return the first batch with large numbers of that sign in the other rows."""

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        large = sign * _CROWD * tensor.detach().abs()
        large[x.row] = tensor.detach()[x.row]
        return leaf(large, tensor.requires_grad)

    return map_tensors(fill, x.one)


def same_row(a: Tree, b: Tree, *, exact: bool, row: int = 0) -> bool:
    """Return whether `row` of `a` is that of `b` up to rounding. Without `exact` more rounding is
    allowed, as between batches of unlike sizes. A batch of one row is compared by that row."""
    found = unlike(a, b, exact=exact, row=row)
    return structure(a) == structure(b) and next(found, None) is None


def same(a: Tree, b: Tree) -> bool:
    """Return whether all rows are the same up to rounding."""
    if structure(a) != structure(b):
        return False
    return all(close(x, y) for x, y in zip(flatten(a), flatten(b), strict=True))


@dataclass(frozen=True, slots=True)
class Unlike:
    """A difference of two results in one tensor's shared row."""

    #: Place in the result, such as `['aux']`; empty if the result is the tensor itself.
    path: str
    #: The two most different numbers, for people.
    seen: str
    #: True if all rows of the tensor are equal, as with a number of the whole batch.
    batch_wide: bool


def unlike(
    a: Tree, b: Tree, *, exact: bool, row: int = 0, there: int | None = None
) -> Iterator[Unlike]:
    """Yield differences between `row` of the tensors of `a` and row `there` (None: `row`) of those
    of `b`, which share a structure."""
    other_row = row if there is None else there
    pairs = zip(_paths(a, ""), flatten(a), flatten(b), strict=True)
    for path, x, y in pairs:
        one, other = _row(x, row), _row(y, other_row)
        if not close(one, other, exact=exact):
            wide = len(x) > 1 and bool((x == x[:1]).all())
            yield Unlike(path, _seen(one, other), wide)


def _row(tensor: Tensor, row: int) -> Tensor:
    return tensor[min(row, len(tensor) - 1) :][:1] if tensor.dim() else tensor


def close(a: Tensor, b: Tensor, *, exact: bool = True) -> bool:
    """Return whether two tensors are the same up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = tolerance_of(a.dtype, exact=exact)
    numbers = a[torch.isfinite(a)].abs()
    scale = numbers.max().item() if numbers.numel() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def tolerance_of(dtype: torch.dtype, *, exact: bool) -> float:
    """Return the rounding allowed, relative to the largest number."""
    return float(torch.finfo(dtype).eps ** (_EXACT if exact else _SUMS))


def finite(tree: Tree) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in flatten(tree))


def leaf(tensor: Tensor, gradient: bool) -> Tensor:
    """Return `tensor` as a leaf, without its history."""
    return tensor.detach().requires_grad_(gradient)


def _seen(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{_form(a)} becomes {_form(b)}"
    x, y = (tensor.detach().flatten().to(torch.float64) for tensor in (a, b))
    at = int((x - y).abs().nan_to_num(torch.inf).argmax())
    return f"{x[at].item():.4g} becomes {y[at].item():.4g}"


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _paths(tree: Any, path: str) -> Iterator[str]:
    """Yield the path of each tensor in `tree`, in the order of `flatten`."""
    if isinstance(tree, Tensor):
        yield path
        return
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in parts:
        yield from _paths(part, f"{path}[{key!r}]")

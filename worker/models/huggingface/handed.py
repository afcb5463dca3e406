"""Arguments of a transformers layer beside hidden states: masks, tables, flags.

Owns how the arguments for one row become those for several. Must not know how they are found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Differ(Exception):
    """Refusal of a layer's arguments that depend on the tokens, or are of no known kind."""


@dataclass(frozen=True, slots=True)
class PerRow:
    """A tensor that repeats for each row of a micro-batch; here for one row, (1, ...).

    It is (n, ...) if a row has n entries in the first dimension.
    """

    one: Tensor


@dataclass(frozen=True, slots=True)
class Handed:
    """The arguments of a layer beside the hidden states."""

    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    def common(self, other: "Handed") -> "Handed":
        """Return these arguments, of one row, with the tensors marked that repeat for each row.
        `other`: the arguments of two other rows, to compare with. Raises Differ."""
        return Handed(_common(self.positional, other.positional), _common(self.named, other.named))

    def to(self, rows: int) -> "Handed":
        return Handed(
            tuple(_expand(value, rows) for value in self.positional),
            {key: _expand(value, rows) for key, value in self.named.items()},
        )


def _common(one: Any, two: Any) -> Any:
    """Return `one`, of one row, with those tensors marked that are repeated in `two`, of two other
    rows. Raises Differ."""
    match one:
        case Tensor() if isinstance(two, Tensor) and not (one.requires_grad or two.requires_grad):
            if torch.equal(one, two):
                return one
            if one.dim() and len(two) == 2 * len(one) and torch.equal(torch.cat([one, one]), two):
                return PerRow(one)
        case tuple() | list() if len(one) == len(two):
            return type(one)(map(_common, one, two))
        case dict() if one.keys() == two.keys():
            return {key: _common(one[key], two[key]) for key in one}
        case None | bool() | int() | float() | str() if one == two:
            return one
    raise Differ


def moved(found: Sequence[Handed], device: torch.device) -> tuple[Handed, ...]:
    """Return the same arguments on `device`. A tensor that several layers share is moved once."""
    moved_tensors: dict[int, Tensor] = {}
    return tuple(
        Handed(
            tuple(_move(value, device, moved_tensors) for value in one.positional),
            {key: _move(value, device, moved_tensors) for key, value in one.named.items()},
        )
        for one in found
    )


def _move(value: Any, device: torch.device, moved_tensors: dict[int, Tensor]) -> Any:
    match value:
        case PerRow():
            return PerRow(_move(value.one, device, moved_tensors))
        case Tensor():
            return moved_tensors.setdefault(id(value), value.to(device))
        case tuple() | list():
            return type(value)(_move(inner, device, moved_tensors) for inner in value)
        case dict():
            return {key: _move(inner, device, moved_tensors) for key, inner in value.items()}
        case _:
            return value


def _expand(value: Any, rows: int) -> Any:
    match value:
        case PerRow():
            size = value.one.shape
            each = value.one.expand(rows, *size)
            return each.reshape(-1, *size[1:]) if size[0] > 1 else each.squeeze(1)
        case tuple() | list():
            return type(value)(_expand(inner, rows) for inner in value)
        case dict():
            return {key: _expand(inner, rows) for key, inner in value.items()}
        case _:
            return value

"""Randomness as a function of its purpose, independent of process and order.

A step must give the same result on any plan, so nothing draws from a process's global generator.
Initial weights come from (seed, layer), dropout masks from (seed, step, sample position, layer,
site), by integer arithmetic, which is exact on every device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oobleck.core.purpose import derive

#: Place in a layer where a mask is used, such as `mlp`; distinct within the layer.
Site = str


def generator(*purpose: object) -> torch.Generator:
    """Return a fresh CPU generator for what `purpose` names."""
    return torch.Generator().manual_seed(derive(*purpose) >> 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKeys:
    """Identity of the samples in a micro-batch's rows: all that dropout may depend on."""

    seed: int
    step: int
    #: Positions in the global batch, one per row.
    positions: tuple[int, ...]
    #: False: no dropout.
    training: bool = True
    #: Step whose state is evaluated; None: in training.
    evaluated: int | None = None

    @property
    def shown_step(self) -> int:
        """Step number that user code sees."""
        return self.step if self.evaluated is None else self.evaluated


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _fold(x: Tensor, bits: int) -> None:
    # Arithmetic shift, since torch has no logical one; the mask removes the copies of the sign bit.
    x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def keep_mask(
    rows: RowKeys, layer: int, site: Site, *, width: int, dropout: float, device: torch.device
) -> Tensor:
    """Return a mask, (rows, width), that is True where a value is kept: a keyed 32-bit hash of the
    index.

    The mixing steps and constants are those of the `lowbias32` hash, with half of the key added
    before each of its two multiplications. A row's key is an argument of the operations on that
    row: a tensor of keys would be copied to the device for every mask.
    """
    keys = [
        derive(rows.seed, "dropout", rows.step, position, layer, site)
        for position in rows.positions
    ]
    index = torch.arange(width, dtype=torch.int32, device=device)
    x = torch.empty(len(keys), width, dtype=torch.int32, device=device)
    for row, key in zip(x, keys, strict=True):
        torch.bitwise_xor(index, _signed(key & 0xFFFFFFFF), out=row)
    _fold(x, 16)
    x.mul_(_signed(0x7FEB352D))
    for row, key in zip(x, keys, strict=True):
        row.bitwise_xor_(_signed(key >> 32))
    _fold(x, 15)
    x.mul_(_signed(0x846CA68B))
    _fold(x, 16)
    return x.bitwise_and_(0x7FFFFFFF) >= round(dropout * (1 << 31))

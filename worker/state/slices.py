"""Pieces of a layer's flat state, as an update takes them: data only."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Numbers of a parameter that this update, or an earlier one, leaves out."""

    numbers: range
    unused: bool
    #: Number of earlier updates that left them out.
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Piece of flat state that is updated as one tensor, in place."""

    #: (1 + moments, n): weights, then the moments in the optimizer's order.
    storage: Tensor
    #: (n), of the mean loss, clipped.
    gradient: Tensor
    #: Whether weight decay applies to it.
    decayed: bool
    #: Numbers to treat separately, counted from the slice's first one.
    apart: Sequence[Apart] = ()

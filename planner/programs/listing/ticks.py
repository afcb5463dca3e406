"""Facts about hops and workers that list scheduling needs, in whole numbers.

It travels in the plan, so that every worker comes to the same order of compute. Must not know where
the numbers come from: `oobleck.planner.cost.listed` does.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTicks:
    """Cost of one micro-batch at one hop, in whole ticks and bytes; rates are in it."""

    forward: int
    #: Together a backward in one piece.
    backward_input: int
    backward_weight: int
    #: A message to or from the hop after is on its way for so long and keeps nobody from computing.
    message: int
    #: What each worker of the hop keeps, from the begin of the forward to the end of the backward.
    kept_bytes: int
    #: The part of them that is kept from the end of `BackwardInput` to that of `BackwardWeight`.
    deferred_bytes: int

    def __post_init__(self) -> None:
        if min(self.forward, self.backward_input, self.backward_weight, self.message) < 0:
            raise ValueError(f"ticks must not be negative: {self}")
        if not 0 <= self.deferred_bytes <= self.kept_bytes:
            raise ValueError(f"deferred bytes must be a part of the kept ones: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Costs of the hops of a plan, and the room that its workers have."""

    #: By route and hop.
    hops: tuple[tuple[HopTicks, ...], ...]
    #: Bytes for what is kept of micro-batches, by rank.
    room: tuple[int, ...]
    #: Whether the backwards of all hops but a route's first come in two parts.
    split: bool

    def __post_init__(self) -> None:
        if any(room < 0 for room in self.room):
            raise ValueError(f"room must not be negative: {min(self.room)}")

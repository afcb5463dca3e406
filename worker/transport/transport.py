"""The interface of what workers of one generation talk with: messages and collectives.

A `Transport` lives for one generation: it is built at the rendezvous, aborted when the generation
is over, and never repaired. `links`, `nccl` and `staged` implement it. Must not know programs,
layers or plans.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch

#: A set of ranks, sorted.
Group = tuple[int, ...]

#: Operations wait for peers' computation; losses release them, not the clock.
OPERATION_TIMEOUT = timedelta(hours=1)


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when it is done; raises TransportError when it cannot be."""


class Transport(Protocol):
    """The peers of one generation, by rank. All methods raise TransportError on a lost peer."""

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending: ...

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending: ...

    def all_reduce(
        self, tensor: torch.Tensor, group: Group, shares: Sequence[torch.Tensor] = ()
    ) -> Pending:
        """Sum `tensor`, which is contiguous, over the group, in place.

        `shares`: flat and contiguous, what this member adds, one behind the other; `tensor` is only
        where the sum comes then. They stay as they are, and must until the sum is there.
        """

    def exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: Group, tag: int
    ) -> Pending:
        """Exchange tensors within the group. `sent`: what each member of the group gets, in its
        order; `received`: where what each has for this one comes. All are contiguous and of one
        type, and what a member has for itself is empty. All members call this for a group in the
        same order."""

    def gather(self, word: bytes) -> list[bytes]:
        """Return the words of all, by rank. All call this in the same order."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the `tensor` of every rank (same shape), by rank."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...

    def end_moving(self) -> None:
        """State that moves between generations has moved: give back what was there for it alone.
        Every rank calls this once, behind `complete`, before its first step."""

    def complete(self) -> None:
        """Return when all that was waited for has happened; raises TransportError if it has not.

        On a device `wait` may only put the end of an operation before what is queued after it,
        but for that of a receive.
        """

    @property
    def connected(self) -> bool:
        """True if everything to be used is there. Some of it may come while training goes on by
        what carries everything. Once true, it stays true."""

    def use_connected(self) -> None:
        """Use all. Every rank calls this at the same point between its operations, when none is
        under way and all ranks are connected."""

    @property
    def failure(self) -> Exception | None:
        """Failure in this worker's own part, not in an operation that it waits for. It ends all,
        and so is the cause of whatever else these raise."""

    def abort(self) -> None:
        """Release whatever waits in this transport. From any thread, any number of times."""

    def dispose(self) -> None:
        """Free what the transport holds; nobody uses it any more."""

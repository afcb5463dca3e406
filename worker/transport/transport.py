"""Interface of the communication between workers of one generation: messages and collectives.

A `Transport` lives for one generation: it is built at the rendezvous, aborted when the generation
is over, and never repaired. `links`, `nccl` and `staged` implement it. Must not know programs,
layers or plans, nor the meaning of messages.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch

from oobleck.core.codec import decode, encode
from oobleck.worker.runtime.errors import TransportError

#: Set of ranks, sorted.
Group = tuple[int, ...]

#: Operations wait for peers' computation; losses release them, not the clock.
OPERATION_TIMEOUT = timedelta(hours=1)


class Pending(Protocol):
    """Operation under way."""

    def wait(self) -> None:
        """Wait until it is done; raises TransportError when it cannot be."""


class Transport(Protocol):
    """Peers of one generation, by rank. All methods raise TransportError on a lost peer.

    Methods with a body suit a transport whose operations end where they are waited for.
    """

    rank: int
    size: int

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending: ...

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending: ...

    def all_reduce(
        self, tensor: torch.Tensor, group: Group, shares: Sequence[torch.Tensor] = ()
    ) -> Pending:
        """Sum `tensor`, which is contiguous, over the group, in place.

        `shares`: flat and contiguous summands of this member, one after the other; `tensor` then
        only receives the sum. They must stay unchanged until the sum is complete.
        """

    def exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: Group, tag: int
    ) -> Pending:
        """Exchange tensors within the group.

        `sent`: tensors for the members of the group, in order; `received`: places for theirs. All
        are contiguous and of one type, and a member's tensor for itself is empty. All members call
        this for a group in the same order.
        """

    def gather(self, word: bytes) -> list[bytes]:
        """Return the words of all, by rank. All call this in the same order."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the `tensor` of every rank (same shape), by rank."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None: ...

    def end_moving(self) -> None:
        """Free the resources for moving state between generations, which has moved. Every rank
        calls this once, after `complete`, before its first step."""
        return None

    def complete(self) -> None:
        """Return when all awaited operations have happened; raises TransportError if one has not.

        On a device `wait` may only order later work after the end of an operation, except for a
        receive.
        """
        return None

    @property
    def connected(self) -> bool:
        """True if every part to be used is ready. Some may become so while training continues by
        another one that carries everything. Once true, it stays true."""
        return True

    def use_connected(self) -> None:
        """Use all parts. Every rank calls this at the same point between its operations, when none
        is under way and all ranks are connected."""
        return None

    @property
    def failure(self) -> Exception | None:
        """Failure in this worker's own part, not in an awaited operation. It ends all operations,
        and so is the cause of other errors."""
        return None

    def abort(self) -> None:
        """Release all waits in this transport. Callable from any thread, any number of times."""

    def dispose(self) -> None:
        """Free the transport's resources; it is no longer used."""


# ---- Exchange of one message from each worker to all others.


T = TypeVar("T")


def tell_all(transport: Transport, message: T, kind: type[T]) -> list[T]:
    """Return the messages of all, by rank. Raises TransportError, also for an invalid message."""
    messages: list[T] = []
    for rank, text in enumerate(transport.gather(encode(message))):
        try:
            messages.append(decode(kind, text))
        except ValueError as error:
            raise TransportError(f"the message of rank {rank} is {error}") from error
    return messages

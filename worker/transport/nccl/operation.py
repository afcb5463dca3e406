"""Operations of a transport over NCCL, from when they are asked for to when their end is seen.

Must not know when they may be launched (`lines`), nor what others of the transport do.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import Work

from oobleck.worker.transport.nccl.communicator import Communicator


class Waiting(Protocol):
    """The transport that an operation is of."""

    #: Whether its device, and no thread, is what waits. Memory of the host has none.
    has_queue: bool

    def advance(self) -> None:
        """Launch what may be."""

    def unaborted(self) -> AbstractContextManager[None]:
        """Keep an abort from beginning within. Raises TransportError after one."""

    def seen_to_end(self, operation: "Operation") -> None:
        """Forget the operation: it has ended and needs nothing any more."""

    def wait_until(self, done: Callable[[], bool], peers: Collection[int] = ()) -> None:
        """Wait until the device has `done` something with `peers`. Raises TransportError after an
        abort, or when one of them leaves, and what `done` raises."""


class Operation:
    """Operation on a communicator. It keeps its tensors until its end is seen."""

    def __init__(
        self,
        transport: Waiting,
        communicator: Communicator,
        peers: Collection[int],
        tensors: Sequence[Tensor],
        begin: Callable[[Sequence[Tensor]], Work],
    ) -> None:
        """`begin`: queues it on the device."""
        self._transport = transport
        self._communicator = communicator
        self.peers = peers
        self._tensors: Sequence[Tensor] | None = tensors
        self._begin = begin
        self._work: Work | None = None
        self._ended = False

    def launch(self) -> None:
        assert self._tensors is not None, "it has not ended"
        self._work = self._begin(self._tensors)

    def is_launched(self) -> bool:
        self._transport.advance()
        return self._work is not None

    def has_ended(self) -> bool:
        """Return whether the operation has ended. Raises TransportError where it has failed."""
        if self._work is None or self._ended:
            return self._ended
        with self._transport.unaborted():
            if not self._communicator.has_ended(self._work):
                return False
        self._ended, self._tensors = True, None
        self._transport.seen_to_end(self)
        return True

    def wait(self) -> None:
        """Wait on the device: what is queued from now on comes behind the operation."""
        self._transport.wait_until(self.is_launched, self.peers)
        assert self._work is not None, "it is launched"
        with self._communicator.calling():
            self._work.wait()
        if not self._transport.has_queue:
            # It returns, too, where the operation cannot end any more.
            self._transport.wait_until(self.has_ended, self.peers)


class Arriving:
    """A receive or an exchange, whose end the host waits for."""

    def __init__(self, transport: Waiting, operation: Operation) -> None:
        self._transport = transport
        self._operation = operation

    def wait(self) -> None:
        self._transport.advance()
        self._transport.wait_until(self._operation.has_ended, self._operation.peers)
        # In the queue of what is computed now, which this does not hold up: it has ended.
        self._operation.wait()

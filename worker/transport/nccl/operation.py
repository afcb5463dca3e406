"""Operations of a transport over NCCL, from their request until their end is seen.

Must not know when they may be launched (`lines`), nor other parts of the transport.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import Work

from oobleck.worker.transport.nccl.communicator import Communicator


class Waiting(Protocol):
    """Transport of an operation."""

    #: True if the device waits by its queue, and no thread does. Host memory has no queue.
    has_queue: bool

    def advance(self) -> None:
        """Launch operations that are ready."""

    def unaborted(self) -> AbstractContextManager[None]:
        """Keep an abort from beginning inside. Raises TransportError after one."""

    def seen_to_end(self, operation: "Operation") -> None:
        """Forget the operation: it has ended."""

    def wait_until(self, done: Callable[[], bool], peers: Collection[int] = ()) -> None:
        """Wait until the device has `done` something with `peers`. Raises TransportError after an
        abort, or when one of them leaves, and the errors of `done`."""


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
        """Make it. `begin`: queues it on the device."""
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
        """Wait on the device: later queued work follows the operation."""
        self._transport.wait_until(self.is_launched, self.peers)
        assert self._work is not None, "it is launched"
        with self._communicator.calling():
            self._work.wait()
        if not self._transport.has_queue:
            # It also returns where the operation can never end.
            self._transport.wait_until(self.has_ended, self.peers)


class Arriving:
    """Receive or exchange whose end the host waits for."""

    def __init__(self, transport: Waiting, operation: Operation) -> None:
        self._transport = transport
        self._operation = operation

    def wait(self) -> None:
        self._transport.advance()
        self._transport.wait_until(self._operation.has_ended, self._operation.peers)
        # In the queue of the current computation, which this does not delay: it has ended.
        self._operation.wait()

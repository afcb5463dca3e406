"""NCCL communicator on one worker, from its making to its end.

Owns its state here: the number of launched operations, whether the last one has ended, and whether
a call has failed. Operations of a communicator run in the order of their launch, so the end of the
last one is the end of all. Must not know generations.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, Work

from oobleck.worker.runtime.errors import NodeError, TransportError
from oobleck.worker.transport.nccl.failures import peers_may_fail
from oobleck.worker.transport.nccl.group import ProcessGroup
from oobleck.worker.transport.nccl.lines import Part

STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Key:
    """Purpose of a communicator, and its processes: a link's sender and receiver, or a sum's
    members in order. A process has at most one communicator of each key."""

    purpose: str
    #: Identities of their links, of one length.
    processes: tuple[bytes, ...]


class Communicator:
    """Communicator, launched on by one thread at a time. Its state may only be queried while no
    abort of it is under way."""

    def __init__(self, key: Key, born: int, group: ProcessGroup, stream: int) -> None:
        """Make it. `born`: epoch of the meeting in which it is made; `stream`: stream of its
        operations."""
        self.key = key
        self.born = born
        self.group = group
        self.stream = stream
        #: True if all its members have used it.
        self.connected = False
        #: True if a call on it has failed.
        self.failed = False
        #: Count of operations since its making.
        self.launched = 0
        #: Last operation, until its end was seen: it keeps its tensors.
        self._last: Work | None = None
        #: Guards both: one thread may see an end while another one launches.
        self._lock = threading.Lock()
        #: Stream by which its operations follow the work that was queued before their request.
        self.behind: torch.cuda.Stream | None = None

    @property
    def stamp(self) -> bytes:
        """Digest that is equal at two of its members exactly if both have launched as many
        operations; no other communicator has the same by chance."""
        told = f"{self.key.purpose} {self.born} {self.launched} ".encode()
        return blake2b(told + b"".join(self.key.processes), digest_size=STAMP_BYTES).digest()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wrap a call of NCCL's on it. Raises as `peers_may_fail` does."""
        try:
            with peers_may_fail():
                yield
        except Exception:
            self.failed = True
            raise

    def launch(self, part: Part, tensors: Sequence[Tensor]) -> Work:
        """Queue its next operation on the device. `tensors`: one; for an exchange the received
        ones, by member, and then the sent ones."""
        own = list(tensors)
        with self.calling():
            if part == "sum":
                work = self.group.allreduce(own, AllreduceOptions())
            elif part == "exchange":
                members = len(own) // 2
                work = self.group.alltoall(own[:members], own[members:], AllToAllOptions())
            elif part == "send":
                work = self.group.send(own, 1, 0)
            else:
                work = self.group.recv(own, 0, 0)
        with self._lock:
            self.launched += 1
            self._last = work
        return work

    def has_ended(self, work: Work | None = None) -> bool:
        """Return whether `work`, launched on it, has ended; by default everything launched. Raises
        as `peers_may_fail` does."""
        work = work or self._last
        if work is None:
            return True
        with self.calling():
            if not work.is_completed():
                return False
            if (error := work.exception()) is not None:
                raise error
        with self._lock:
            if self._last is work:
                self._last = None
        return True

    def is_whole(self) -> bool:
        """Return whether it is connected, and everything launched on it has ended and succeeded."""
        if not self.connected or self.failed:
            return False
        try:
            return self.has_ended()
        except (RuntimeError, TransportError, NodeError):  # the user of the result raises it
            return False

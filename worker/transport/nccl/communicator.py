"""NCCL communicator on one worker, from its making to its end, and the operations on it.

Owns its state here: the number of launched operations, whether the last one has ended, and whether
a call has failed. Operations of a communicator run in the order of their launch, so the end of the
last one is the end of all. Must not know generations.
"""

import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, Work

from oobleck.planner.programs.communicators import Name
from oobleck.worker.runtime.errors import NodeError, TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.link import Incoming
from oobleck.worker.transport.links.wire import Kind, Label
from oobleck.worker.transport.nccl.group import ProcessGroup, peers_may_fail

# ---- Readiness of NCCL operations: one is launched only when all participants are about to
# launch it.
#
# An operation is a kernel that occupies a part of the GPU until its peers' kernels run. Other
# work of the device may have to wait for it, even work that a peer waits for. So workers announce
# over the links between hosts what they are ready for, and launch only what their peers launch at
# once.
#
# A receiver announces that it wants a message. The sender sends it once the device has computed it,
# and says so, and the receiver receives it: neither holds a part of its GPU until then. In a sum or
# an exchange each member announces that it is ready. All operations of a line have one order on all
# its members, so a number identifies an operation.
#
# There is no deadlock. The computation of a message waits only for operations that are launched,
# since the host waits for an operation's launch before it queues what follows it.


_NUMBER = struct.Struct("!Q")


#: Part in an operation: of a link the sender's or the receiver's; else the same for each member.
Part = Literal["send", "receive", "sum", "exchange"]
#: Begins the operation on the device.
Launch = Callable[[], object]
#: Returns whether the device has computed what is to be sent.
IsThere = Callable[[], bool]


def key_of(name: Name) -> int:
    """Return 63 bits of a digest, so that no two names collide by chance."""
    text = f"{name[0]}:{','.join(map(str, name[1]))}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1


def part_of(name: Name, rank: int) -> Part:
    """Return the part of the member of this rank in a line."""
    if name[0] == "owners":
        return "sum"
    if name[0] == "stage":
        return "exchange"
    return "send" if rank == name[1][0] else "receive"


class _Notes(Incoming):
    """Notes of one peer on a line, from now until the meeting is over."""

    def __init__(
        self, links: LinkTransport, peer: bytes, label: Label, wake: Callable[[], None]
    ) -> None:
        self.peer = peer
        #: Operations that the peer is ready for.
        self.count = 0
        #: True if the peer sent an unexpected number.
        self.confused = False
        self._links = links
        self._label = label
        self._wake = wake
        self._content = bytearray()
        with links.links.lock:
            links.check()
            links.links.post(peer, label, self)

    def room(self, size: int) -> memoryview:
        self._content = bytearray(size)
        return memoryview(self._content)

    def arrived(self) -> None:
        self.confused = self.confused or bytes(self._content) != _NUMBER.pack(self.count)
        self.count += 1
        self._links.links.post(self.peer, self._label, self)
        self._wake()


class Line:
    """Operations of one group, one worker's part. Used by one thread at a time."""

    def __init__(
        self,
        links: LinkTransport,
        name: Name,
        part: Part,
        wake: Callable[[], None],
    ) -> None:
        """Make the line. `wake`: called, from any thread, when something new may be launched.
        Raises TransportError."""
        self.peers = [rank for rank in name[1] if rank != links.rank]
        self._links = links
        self._part = part
        self._label = Label(Kind.NOTE, key_of(name), 0)
        links.reach_all(self.peers)
        identities = [links.reach(peer) for peer in self.peers]
        self._notes = [_Notes(links, each, self._label, wake) for each in identities]
        self._wanted: deque[tuple[Launch, IsThere]] = deque()
        self._said = 0
        self._launched = 0

    def want(self, launch: Launch, is_there: IsThere = lambda: True) -> None:
        """Add the line's next operation. Raises TransportError."""
        self._wanted.append((launch, is_there))
        if self._part != "send":
            self._say()

    def advance(self) -> bool:
        """Launch operations that are ready. Return whether the next one waits for the device alone.
        Raises TransportError."""
        if any(notes.confused for notes in self._notes):
            raise TransportError("a peer counts the operations of NCCL differently")
        ready = min(notes.count for notes in self._notes)
        while self._wanted and self._launched < ready and self._is_joined():
            launch, is_there = self._wanted[0]
            if self._part == "send" and not is_there():
                return True
            self._wanted.popleft()
            self._launched += 1
            launch()
            if self._part == "send":
                self._say()
        return False

    def _is_joined(self) -> bool:
        """Return whether the peers launch the next operation, too; peers that have left do not. A
        sender has launched it before its announcement."""
        left = self._links.links.has_left
        return self._part == "receive" or not any(left(notes.peer) for notes in self._notes)

    def _say(self) -> None:
        number = memoryview(_NUMBER.pack(self._said))
        self._said += 1
        with self._links.links.lock:
            self._links.check()
            for notes in self._notes:
                self._links.links.send(notes.peer, self._label, number)


# ---- Locks, in the order in which a thread takes them.
#
# 1. `Communicators.launching`, one per device: launches and connecting. NCCL calls it unsafe to
#    launch on two communicators of one device at once.
# 2. One of the transport or of `Connecting`, for the length of a poll: no abort begins meanwhile.
# 3. `Communicator._calls`: NCCL allows one thread at a time on a communicator.
# 4. Those of the links.
#
# The holder of the first lock waits at most for its own device, on which then no kernel waits for a
# peer (`Connecting`). So it is released soon, whatever the peers do. Others wait for it by `held`,
# which an abort ends. A poll does not wait for the third lock, whose holder may be in a launch.
# Aborts take none of the locks: they must end a call of NCCL's that does not return.


_LOOK_S = 0.05


@contextmanager
def held(lock: threading.Lock, check: Callable[[], None]) -> Iterator[None]:
    """Hold a lock. `check` is called during a long wait for it, and may raise."""
    while not lock.acquire(timeout=_LOOK_S):
        check()
    try:
        yield
    finally:
        lock.release()


STAMP_BYTES = 8


@dataclass(frozen=True, slots=True)
class Key:
    """Purpose of a communicator, and its processes: a link's sender and receiver, or a sum's
    members in order. A process has at most one communicator of each key."""

    purpose: str
    #: Identities of their links, of one length.
    processes: tuple[bytes, ...]


class Communicator:
    """Communicator. Its state may only be queried while no abort of it is under way."""

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
        #: Held by the thread that is in NCCL with it. A question that falls into another thread's
        #: launch would also keep torch from ever seeing an error.
        self._calls = threading.Lock()
        #: Stream by which its operations follow the work that was queued before their request.
        self.behind: torch.Stream | None = None

    @property
    def stamp(self) -> bytes:
        """Digest that is equal at two of its members exactly if both have launched as many
        operations; no other communicator has the same by chance."""
        text = f"{self.key.purpose} {self.born} {self.launched} ".encode()
        return blake2b(text + b"".join(self.key.processes), digest_size=STAMP_BYTES).digest()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wrap a call of NCCL's on it. Raises as `peers_may_fail` does."""
        try:
            with peers_may_fail():
                yield
        except Exception:
            self.failed = True
            raise

    def await_connection(self, device: torch.device) -> None:
        """Wait until NCCL has connected it, as an empty sum does, which launches nothing."""
        with self._calls, self.calling():
            self.group.allreduce([torch.empty(0, device=device)], AllreduceOptions())

    def launch(self, part: Part, tensors: Sequence[Tensor]) -> Work:
        """Queue its next operation on the device. `tensors`: one; for an exchange the received
        ones, by member, and then the sent ones."""
        own = list(tensors)
        with self._calls, self.calling():
            if part == "sum":
                work = self.group.allreduce(own, AllreduceOptions())
            elif part == "exchange":
                members = len(own) // 2
                work = self.group.alltoall(own[:members], own[members:], AllToAllOptions())
            elif part == "send":
                work = self.group.send(own, 1, 0)
            else:
                work = self.group.recv(own, 0, 0)
            self.launched += 1
            self._last = work
        return work

    def has_ended(self, work: Work | None = None) -> bool:
        """Return whether `work`, launched on it, is seen to have ended; by default everything
        launched. False while another thread is in NCCL with it. Raises as `peers_may_fail` does,
        maybe before its kernel has ended."""
        if not self._calls.acquire(blocking=False):
            return False
        try:
            work = work or self._last
            if work is None:
                return True
            with self.calling():
                if not work.is_completed():
                    return False
                if (error := work.exception()) is not None:
                    raise error
            if self._last is work:
                self._last = None
        finally:
            self._calls.release()
        return True

    def is_whole(self) -> bool:
        """Return whether it is connected, and everything launched on it has ended and succeeded."""
        if not self.connected or self.failed:
            return False
        try:
            return self.has_ended()
        except (RuntimeError, TransportError, NodeError):  # the user of the result raises it
            return False


# ---- Operations of a transport over NCCL, from their request until their end is seen.


class Waiting(Protocol):
    """Transport of an operation."""

    #: True if the device waits by its queue, and no thread does. Host memory has no queue.
    has_queue: bool

    def advance(self) -> object:
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
            # torch's `wait` would hold the thread up, as it does without a watchdog.
            self._work.synchronize()
        if not self._transport.has_queue:
            self._transport.wait_until(self.has_ended, self.peers)


class Arriving:
    """Receive or exchange whose end the host waits for."""

    def __init__(self, transport: Waiting, operation: Operation) -> None:
        self._transport = transport
        self._operation = operation

    def wait(self) -> None:
        self._transport.advance()
        self._transport.wait_until(self._operation.has_ended, self._operation.peers)
        # Order later work behind the operation, without delay, since it has ended.
        self._operation.wait()

"""Readiness of NCCL operations: one is launched only when all participants are about to launch it.

An operation is a kernel that occupies a part of the GPU until its peers' kernels run. Other work of
the device may have to wait for it, even work that a peer waits for. So workers announce over the
links between hosts what they are ready for, and launch only what their peers launch at once.

A receiver announces that it wants a message, the sender then sends it and says so, and the receiver
receives it. In a sum or an exchange each member announces that it is ready. All operations of a
line have one order on all its members, so a number identifies an operation. Must not know NCCL's
groups.
"""

import struct
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.frame import Kind, Label
from oobleck.worker.transport.links.link import Incoming

_NUMBER = struct.Struct("!Q")

#: Purpose of a group ("owners": sums, "stage": exchanges, "link": messages), and the ranks of its
#: members; for a link the sender's and the receiver's.
Name = tuple[str, tuple[int, ...]]

#: Part in an operation: of a link the sender's or the receiver's; else the same for each member.
Part = Literal["send", "receive", "sum", "exchange"]
#: Begins the operation on the device.
Launch = Callable[[], object]


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
        self._wanted: deque[Launch] = deque()
        self._said = 0
        self._launched = 0

    def want(self, launch: Launch) -> None:
        """Add the line's next operation. Raises TransportError."""
        self._wanted.append(launch)
        if self._part != "send":
            self._say()

    def advance(self) -> None:
        """Launch operations that are ready. Raises TransportError."""
        if any(notes.confused for notes in self._notes):
            raise TransportError("a peer counts the operations of NCCL differently")
        ready = min(notes.count for notes in self._notes)
        while self._wanted and self._launched < ready and self._is_joined():
            launch = self._wanted.popleft()
            self._launched += 1
            launch()
            if self._part == "send":
                self._say()

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

"""Transfer of frames into a connection and out of it: as they are, or sealed.

A sealed frame is its header, then its content in pieces, each sealed by itself. So a size is
authentic before memory is allocated for it, and no end holds more than a piece. No call here
blocks: data that the kernel cannot take or give raises BlockingIOError. Must not know the frames,
nor their receivers.
"""

import ctypes
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from oobleck.worker.transport.links.greeting import PROOF_BYTES, TAG_BYTES, Seals

# ---- Frames of a link between two workers, each a header and its content.


class Kind(IntEnum):
    """Purpose of a frame."""

    MESSAGE = 1
    #: A member's share of a chunk, sent to the member that adds it; and the sum, sent back.
    SHARE = 2
    TOTAL = 3
    #: The words of a member and those below it in the tree; and the words of all, from the root.
    WORDS = 4
    TABLE = 5
    #: Arrival of the sender at the meeting, with its word for the host of the meeting.
    STANDING = 8
    #: Departure of the sender in order: it sends nothing more, and its end is no loss to the
    #: meeting.
    GOODBYE = 6
    #: Departure that also drops unsent frames. No loss by itself either: a sender that gives up has
    #: reported one, or was ordered to.
    GIVEN_UP = 7
    #: Departure because a newer meeting is wanted, so that none waits for this one.
    CALLED_OFF = 9
    #: Pieces of state for a future meeting; and the receiver's progress with it.
    FEED = 10
    FED = 11
    #: Proof that the sender has the secret of that meeting, when the link was made in another one.
    PROOF = 12
    #: Number of NCCL operations that the sender is ready for; or the identifier of an NCCL group.
    NOTE = 13


#: Words about the end of a meeting, which are never dropped.
LEAVING = frozenset({Kind.GOODBYE, Kind.GIVEN_UP, Kind.CALLED_OFF})
#: Frames for a meeting in preparation, whether or not this worker has entered it.
FEEDING = frozenset({Kind.FEED, Kind.FED, Kind.PROOF})


class Label(NamedTuple):
    """Label of a peer's frame within one meeting. Frames of the same label arrive in order."""

    kind: int
    key: int
    part: int


#: Frames for the links themselves; they are handled even before this worker enters their meeting.
ABOUT_LINKS = frozenset({Kind.STANDING, Kind.PROOF})

#: Most bytes of a frame's content. It bounds the wait of urgent frames, and the bytes sent or read
#: in vain after a meeting is given up.
MOST_BYTES = 1 << 20
#: Fewest and most bytes of content in a frame of each kind.
SIZES: dict[int, tuple[int, int]] = {
    Kind.MESSAGE: (0, MOST_BYTES),
    Kind.SHARE: (0, MOST_BYTES),
    Kind.TOTAL: (0, MOST_BYTES),
    # The words of one worker and of all below it in the tree, and those of all.
    Kind.WORDS: (0, 64 << 20),
    Kind.TABLE: (0, 64 << 20),
    Kind.STANDING: (PROOF_BYTES, 16 << 20),
    Kind.GOODBYE: (0, 0),
    Kind.GIVEN_UP: (0, 0),
    Kind.CALLED_OFF: (0, 0),
    Kind.FEED: (0, MOST_BYTES),
    Kind.FED: (0, 8),
    Kind.PROOF: (PROOF_BYTES, PROOF_BYTES),
    Kind.NOTE: (0, MOST_BYTES),
}

#: Epoch, label, and the size of the content that follows.
HEADER = struct.Struct("!QBqIQ")

#: Priorities; the lowest number is sent first.
URGENT, ORDINARY, BULK, BACKGROUND = range(4)
_PRIORITIES = {
    Kind.MESSAGE: ORDINARY,
    Kind.NOTE: URGENT,
    Kind.WORDS: URGENT,
    Kind.TABLE: URGENT,
    Kind.STANDING: URGENT,
    Kind.PROOF: URGENT,
    Kind.FEED: BACKGROUND,
    Kind.FED: URGENT,
}


def priority_of(kind: int) -> int:
    """Return the priority of a frame. Sums are sent after the messages that other workers compute
    on, a departure after all of its meeting, and frames for a later meeting after everything."""
    return _PRIORITIES.get(Kind(kind), BULK)


def check_header(kind: int, size: int) -> None:
    """Raise ConnectionError for a header that no peer of this release sends."""
    sizes = SIZES.get(kind)
    if sizes is None:
        raise ConnectionError(f"sent a frame of an unknown kind, {kind}")
    least, most = sizes
    if not least <= size <= most:
        raise ConnectionError(
            f"sent a frame of kind {Kind(kind).name} with {size} bytes of content"
        )


def pieces(content: memoryview) -> list[memoryview]:
    """Cut the content into contents of frames; one empty piece where there is no content."""
    starts = range(0, max(1, len(content)), MOST_BYTES)
    return [content[start : start + MOST_BYTES] for start in starts]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory; writing there writes to the tensor.

    numpy is avoided: it would keep the tensor's storage from being resized, which stages of several
    workers do to free memory.
    """
    assert tensor.is_contiguous(), "only a contiguous tensor is one run of bytes"
    if not tensor.numel():
        return memoryview(bytearray())  # unlike b"", it is writable
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    content.tensor = tensor  # type: ignore[attr-defined]  # kept alive by the view
    return memoryview(content).cast("B")


#: Bytes of content that are sealed at once.
PIECE_BYTES = 256 << 10
#: Bytes read at once where less is wanted: small frames arrive many at a time.
_AHEAD_BYTES = 64 << 10


class Wire(Protocol):
    """Local end of a connection. All methods but the properties raise OSError when it is over."""

    @property
    def half_out(self) -> bool:
        """True if `put` may have sent more than it reported. Then it must be called again with the
        same data."""

    @property
    def holds(self) -> bool:
        """True if `take` has data without asking the kernel."""

    def put(self, left: Sequence[memoryview]) -> int:
        """Send some of the rest of a frame; return how many bytes of it were sent."""

    def take(self, room: memoryview) -> int:
        """Receive some bytes; none at the end of the connection. The rest of a header and of a
        content are requested in turns."""


class ClearWire:
    half_out = False
    holds = False

    def __init__(self, connected: socket.socket) -> None:
        self.put = connected.sendmsg
        self.take = connected.recv_into


class SealedWire:
    def __init__(self, connected: socket.socket, seals: Seals) -> None:
        self._socket = connected
        self._seals = seals
        #: Sealed and unsent data, and the number of the frame's bytes in it.
        self._sealed = memoryview(bytearray(HEADER.size + PIECE_BYTES + 2 * TAG_BYTES))
        self._leaving = memoryview(b"")
        self._leaving_bytes = 0
        #: Bytes of the outgoing frame's content that are not sealed yet, and of the incoming one's
        #: that are not opened yet. 0: a header is next.
        self._to_seal = self._to_open = 0
        self._buffer = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        self._start = self._end = 0

    # ---- out

    @property
    def half_out(self) -> bool:
        return bool(self._leaving)

    def put(self, left: Sequence[memoryview]) -> int:
        if not self._leaving:
            self._seal(left)
        while self._leaving:
            count = self._socket.send(self._leaving)
            self._leaving = self._leaving[count:]
        return self._leaving_bytes

    def _seal(self, left: Sequence[memoryview]) -> None:
        """Seal the next piece; a header together with the first piece of its content."""
        first, *rest = left
        content, sealed_bytes = left, 0
        self._leaving_bytes = 0
        if not self._to_seal:
            header = first[: HEADER.size]
            *_, self._to_seal = HEADER.unpack(header)
            sealed_bytes = HEADER.size + TAG_BYTES
            self._seals.outward.close(header, self._sealed[:sealed_bytes])
            self._leaving_bytes = HEADER.size
            content = rest or [first[HEADER.size :]]
        if count := min(self._to_seal, PIECE_BYTES):
            end = sealed_bytes + count + TAG_BYTES
            self._seals.outward.close(_run(content, count), self._sealed[sealed_bytes:end])
            self._to_seal -= count
            self._leaving_bytes += count
            sealed_bytes = end
        self._leaving = self._sealed[:sealed_bytes]

    # ---- in

    @property
    def _next_bytes(self) -> int:
        """Size of the next piece."""
        return min(self._to_open, PIECE_BYTES) or HEADER.size

    @property
    def holds(self) -> bool:
        return self._end - self._start >= self._next_bytes + TAG_BYTES

    def take(self, room: memoryview) -> int:
        while not self.holds:
            if not self._fill():
                return 0
        count = self._next_bytes
        end = self._start + count + TAG_BYTES
        self._seals.inward.open(self._buffer[self._start : end], room[:count])
        self._start = end
        if self._to_open:
            self._to_open -= count
        else:
            *_, self._to_open = HEADER.unpack_from(room)
        return count

    def _fill(self) -> int:
        """Read the missing bytes of the next piece, and further available ones after a
        short piece.
        """
        if (
            self._start + self._next_bytes + TAG_BYTES > len(self._buffer)
            or self._start == self._end
        ):
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        end = self._start + max(self._next_bytes + TAG_BYTES, _AHEAD_BYTES)
        count = self._socket.recv_into(self._buffer[self._end : end])
        self._end += count
        return count


def _run(pieces: Sequence[memoryview], size: int) -> memoryview:
    """Return the first `size` bytes as one run of memory, copied if necessary."""
    if size <= len(pieces[0]):
        return pieces[0][:size]
    run = bytearray()
    for piece in pieces:
        run += piece[: size - len(run)]
    return memoryview(run)

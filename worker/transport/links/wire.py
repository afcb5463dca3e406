"""Transfer of frames into a connection and out of it: as they are, or sealed.

A sealed frame is its header, then its content in pieces, each sealed by itself. So a size is
authentic before memory is allocated for it, and no end holds more than a piece. No call here
blocks: data that the kernel cannot take or give raises BlockingIOError. Must not know the frames,
nor their receivers.
"""

import socket
from collections.abc import Sequence
from typing import Protocol

from oobleck.worker.transport.links.frame import HEADER
from oobleck.worker.transport.links.sealing import TAG_BYTES, Seals

#: Bytes of content that are sealed at once.
PIECE_BYTES = 256 << 10
#: Bytes read at once where less is wanted: small frames arrive many at a time.
_AHEAD_BYTES = 64 << 10


class Wire(Protocol):
    """Local end of a connection. All methods but the properties raise OSError when it is over."""

    @property
    def half_out(self) -> bool:
        """True if a part of the data last given to `put` may have been sent unreported. Then the
        same data must be given again."""

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

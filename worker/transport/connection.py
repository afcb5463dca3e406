"""One connection to a peer: messages on their way out, and the one that is coming in.

Nothing here waits. A message that somebody waits for is read into its tensor, an early one into a
buffer; messages with the same tag arrive in the order in which they were sent. Must not know who
the peer is.
"""

import ctypes
import socket
import struct
from collections import defaultdict, deque

import torch

#: Tag and bytes of what follows.
_HEADER = struct.Struct("!qQ")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory; what is written there is written to the tensor.

    Not by way of numpy, which would keep the tensor's storage from ever being resized, as stages
    of several workers do to give memory back.
    """
    assert tensor.is_contiguous(), "only a contiguous tensor is one run of bytes"
    if not tensor.numel():
        return memoryview(b"")
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    content.tensor = tensor  # type: ignore[attr-defined]  # lives as long as the view does
    return memoryview(content).cast("B")


class Arrival:
    """A message that is waited for: where it goes, and whether it is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.room = bytes_of(tensor)
        self.done = False

    def fill(self, content: bytearray) -> None:
        self.check_size(len(content))
        self.room[:] = content
        self.done = True

    def check_size(self, size: int) -> None:
        assert len(self.room) == size, f"{size} bytes came for a tensor of {len(self.room)}"


class Connection:
    """A connected socket. All methods raise OSError when the peer is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        #: Bytes since the begin.
        self.queued = 0
        self.sent = 0
        self._outgoing: deque[memoryview] = deque()
        self._posted: defaultdict[int, deque[Arrival]] = defaultdict(deque)
        #: Messages that came before somebody waited for them.
        self._early: defaultdict[int, deque[bytearray]] = defaultdict(deque)
        self._header = bytearray(_HEADER.size)
        #: Of the message that is coming in; None: its header is.
        self._tag: int | None = None
        self._arrival: Arrival | None = None
        self._buffer = bytearray()
        #: What is still missing of header or message.
        self._room = memoryview(self._header)

    def send(self, tag: int, content: memoryview) -> None:
        """Queue a message, and hand the kernel what it takes."""
        self._outgoing += (memoryview(_HEADER.pack(tag, len(content))), content)
        self.queued += _HEADER.size + len(content)
        self.write()

    @property
    def blocked(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return bool(self._outgoing)

    def write(self) -> None:
        """Hand the kernel what it takes of the queue."""
        while self._outgoing:
            try:
                count = self.socket.sendmsg(self._outgoing)
            except BlockingIOError:
                return
            self.sent += count
            while self._outgoing and count >= len(self._outgoing[0]):
                count -= len(self._outgoing.popleft())
            if count:
                self._outgoing[0] = self._outgoing[0][count:]

    def post(self, tag: int, arrival: Arrival) -> None:
        """Receive the next message with `tag` into `arrival`."""
        if self._early[tag]:
            arrival.fill(self._early[tag].popleft())
        else:
            self._posted[tag].append(arrival)

    def read(self) -> None:
        """Take in what is there."""
        while True:
            if not self._room:
                self._next()
                continue
            try:
                count = self.socket.recv_into(self._room)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("connection closed by peer")
            self._room = self._room[count:]

    def _next(self) -> None:
        """The header is complete, or the message that it announced."""
        if self._tag is None:
            self._tag, size = _HEADER.unpack(self._header)
            waiting = self._posted[self._tag]
            self._arrival = waiting.popleft() if waiting else None
            if self._arrival is None:
                self._buffer = bytearray(size)
                self._room = memoryview(self._buffer)
            else:
                self._arrival.check_size(size)
                self._room = self._arrival.room
            return
        if self._arrival is not None:
            self._arrival.done = True
        elif self._posted[self._tag]:
            self._posted[self._tag].popleft().fill(self._buffer)
        else:
            self._early[self._tag].append(self._buffer)
        self._tag, self._arrival = None, None
        self._room = memoryview(self._header)

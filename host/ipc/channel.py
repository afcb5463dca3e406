"""Frames on a stream socket: a length of four bytes, big-endian, then a message's JSON text.

`Channel` is the blocking side (workers, warm process); the agent reads the same frames with asyncio
through `read_frame`. Descriptors travel beside a frame's first byte.
"""

import array
import asyncio
import socket
import threading
from typing import Generic, TypeVar

import msgspec

from oobleck.core.codec import choose, encode

T = TypeVar("T")

_LENGTH_BYTES = 4
#: Far above any plan of thousands of workers; a longer frame means a broken peer.
MAX_FRAME_BYTES = 64 << 20


def frame(message: object) -> bytes:
    """Return the bytes of one message on the wire."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _check_length(prefix: bytes) -> int:
    length = int.from_bytes(prefix, "big")
    if length > MAX_FRAME_BYTES:
        raise ConnectionError(f"peer announced a frame of {length} bytes")
    return length


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next frame's body; None when the peer has closed its end."""
    try:
        prefix = await reader.readexactly(_LENGTH_BYTES)
        return await reader.readexactly(_check_length(prefix))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


class Channel(Generic[T]):
    """Blocking end of a channel; one thread reads, any thread sends."""

    def __init__(self, sock: socket.socket, incoming: object) -> None:
        """Open a channel. `incoming`: the type (a union of tagged Structs) of the peer's
        messages."""
        self._socket = sock
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(incoming, dec_hook=choose)
        self._send_lock = threading.Lock()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: object) -> None:
        """Send a message; raises OSError when the peer is gone."""
        data = frame(message)
        with self._send_lock:
            self._socket.sendall(data)

    def receive(self) -> T | None:
        """Wait for the next message; None when the peer has closed its end."""
        prefix = self._read(_LENGTH_BYTES)
        if prefix is None:
            return None
        body = self._read(_check_length(prefix))
        return None if body is None else self._decoder.decode(body)

    def take_descriptors(self) -> list[int]:
        """Take the descriptors that arrived with the messages received so far."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    count - len(parts), socket.CMSG_SPACE(8 * array.array("i").itemsize)
                )
            except ConnectionResetError:
                return None
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                    self._descriptors.extend(received)
            if not data:
                return None
            parts += data
        return bytes(parts)

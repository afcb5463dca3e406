"""What workers have to say, in one piece: by rank, or several words of one. And a frame of it."""

import struct
from collections.abc import Iterable, Iterator

from oobleck.worker.transport.links.link import Incoming

#: Rank, and bytes that follow.
_WORD = struct.Struct("!IQ")


class Words(Incoming):
    """A frame that is waited for as a whole."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.done = False

    def room(self, size: int) -> memoryview:
        self.content = bytearray(size)
        return memoryview(self.content)

    def arrived(self) -> None:
        self.done = True

    def is_there(self) -> bool:
        return self.done


def entry(rank: int, word: bytes) -> bytes:
    """One worker's, for a table of such, which is nothing but one after the other."""
    return _WORD.pack(rank, len(word)) + word


def entries(table: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Rank and word of each."""
    at = 0
    while at < len(table):
        rank, length = _WORD.unpack_from(table, at)
        at += _WORD.size
        yield rank, bytes(table[at : at + length])
        at += length


def joined(words: Iterable[bytes]) -> bytes:
    """Several of one worker as one."""
    return b"".join(entry(number, word) for number, word in enumerate(words))


def parts(word: bytes) -> list[bytes]:
    """What was joined."""
    return [part for _, part in entries(word)]

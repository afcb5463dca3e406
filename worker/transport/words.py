"""Packing of workers' words into one piece, by rank or several of one worker; and a frame
for it."""

import struct
from collections.abc import Iterable, Iterator
from operator import itemgetter

from oobleck.core.units import head
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.link import Incoming

#: Rank, and the size of the bytes that follow.
_WORD = struct.Struct("!IQ")


class Words(Incoming):
    """Frame that is waited for as a whole."""

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
    """Pack one worker's entry of a table, which is a sequence of entries."""
    return _WORD.pack(rank, len(word)) + word


def entries(table: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield rank and word of each entry. Raises TransportError for an invalid table."""
    at = 0
    while at < len(table):
        if len(table) - at < _WORD.size:
            raise TransportError("the members' words are cut short")
        rank, length = _WORD.unpack_from(table, at)
        at += _WORD.size
        if len(table) - at < length:
            raise TransportError("the members' words are cut short")
        yield rank, bytes(table[at : at + length])
        at += length


def words_of_all(table: bytes | bytearray, size: int) -> list[bytes]:
    """Return the words of `size` workers, by rank. Raises TransportError unless each has
    sent one."""
    told = sorted(entries(table), key=itemgetter(0))
    if (ranks := [rank for rank, _ in told]) != list(range(size)):
        raise TransportError(f"the ranks {head(str(ranks))} have sent a word, of {size}")
    return [word for _, word in told]


def joined(words: Iterable[bytes]) -> bytes:
    """Pack several words of one worker as one."""
    return b"".join(entry(number, word) for number, word in enumerate(words))


def parts(word: bytes, count: int) -> list[bytes]:
    """Split joined words. Raises TransportError unless there were `count`."""
    return words_of_all(word, count)

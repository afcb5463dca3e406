"""Trees along which workers send words up to the root and down from there, and their packing.

Gatherings use a tree with a fan-out of 64, which is a star for up to 65 workers. A few workers all
have links with each other. Many have only the links that they need, so the number of links grows
with that of the workers, not with its square.
"""

import struct
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from oobleck.core.units import head
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.link import Incoming

#: Most workers directly below one worker of the tree.
FAN_OUT = 64
#: Most workers, or members of a group, that all have links with each other.
MOST_MESHED = 16


class Place(NamedTuple):
    """Place of a worker in the tree: the worker above and those below, by rank."""

    #: None: it is the root.
    above: int | None
    below: tuple[int, ...]


def place_of(rank: int, size: int, root: int = 0, fan_out: int | None = None) -> Place:
    """Return the place of `rank` in a tree in rank order, in which `root` and rank 0 are swapped.
    `fan_out`: most workers directly below one; None: `FAN_OUT`."""
    fan_out = FAN_OUT if fan_out is None else fan_out
    swapped = {root: 0, 0: root}
    at = swapped.get(rank, rank)
    first = at * fan_out + 1
    below = tuple(swapped.get(each, each) for each in range(first, min(first + fan_out, size)))
    above = (at - 1) // fan_out
    return Place(swapped.get(above, above) if at else None, below)


def tree_neighbours(rank: int, size: int, fan_out: int | None = None) -> set[int]:
    """Return the ranks with which a worker exchanges gathered words."""
    above, below = place_of(rank, size, fan_out=fan_out)
    return {*below, *([] if above is None else [above])}


def ring_neighbours(rank: int, size: int) -> set[int]:
    return {(rank - 1) % size, (rank + 1) % size}


def sum_places(index: int, size: int, chunks: int, turn: int) -> list[Place]:
    """Return the places of member `index` in the trees of a group sum's chunks.

    In a small group each chunk has one member that adds it and sends the sum to all others; `turn`
    gives the first one. In a large one a single chunk uses the flat tree. Many chunks go from
    member to member, each of which then sends and adds as much as any other.
    """
    if size <= MOST_MESHED:
        return [place_of(index, size, (turn + part) % size, size - 1) for part in range(chunks)]
    return [place_of(index, size) if chunks == 1 else place_of(index, size, fan_out=1)] * chunks


def sum_neighbours(index: int, size: int) -> set[int]:
    """Return the members with which a member of a group exchanges data in sums."""
    if size <= MOST_MESHED:
        return set(range(size)) - {index}
    return tree_neighbours(index, size) | tree_neighbours(index, size, fan_out=1)


# ---- Packing of words: those of several workers by rank, or several of one worker.


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

"""The tree along which workers tell each other something: up to its root, and down from there.

As flat as a worker has hands, so up to 64 workers below the root it is a star. Pure.
"""

from typing import NamedTuple

#: How many a worker of the tree hears from.
HANDS = 64


class Place(NamedTuple):
    """Whom a worker tells, and whom it hears from, by rank."""

    #: None: it is the root.
    above: int | None
    below: tuple[int, ...]


def place_of(rank: int, size: int, root: int = 0) -> Place:
    """The place of `rank`. `root` and rank 0 have changed places; all others are in rank order."""
    swapped = {root: 0, 0: root}
    at = swapped.get(rank, rank)
    first = at * HANDS + 1
    below = tuple(swapped.get(each, each) for each in range(first, min(first + HANDS, size)))
    above = (at - 1) // HANDS
    return Place(swapped.get(above, above) if at else None, below)


def tree_neighbours(rank: int, size: int) -> set[int]:
    """With whom a worker exchanges what is gathered from all."""
    above, below = place_of(rank, size)
    return {*below, *([] if above is None else [above])}


def ring_neighbours(rank: int, size: int) -> set[int]:
    return {(rank - 1) % size, (rank + 1) % size}

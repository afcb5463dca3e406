"""The trees along which workers tell each other something: up to the root, and down from there.

What all have to say goes along one that is as flat as a worker has hands, so up to 64 workers below
the root it is a star. Few workers all have links with each other; many have those that they need,
and their number grows with that of the workers, not with its square. Pure.
"""

from typing import NamedTuple

#: How many a worker of the tree hears from.
HANDS = 64
#: Up to so many workers, or members of a group, all have links with each other.
MOST_MESHED = 16


class Place(NamedTuple):
    """Place of a worker in the tree: the worker it tells, and those it hears from, by rank."""

    #: None: it is the root.
    above: int | None
    below: tuple[int, ...]


def place_of(rank: int, size: int, root: int = 0, hands: int | None = None) -> Place:
    """Return the place of `rank`. `root` and rank 0 have changed places; all others are in rank
    order. `hands`: how many a worker hears from at the most, if not the usual number."""
    hands = HANDS if hands is None else hands
    swapped = {root: 0, 0: root}
    at = swapped.get(rank, rank)
    first = at * hands + 1
    below = tuple(swapped.get(each, each) for each in range(first, min(first + hands, size)))
    above = (at - 1) // hands
    return Place(swapped.get(above, above) if at else None, below)


def tree_neighbours(rank: int, size: int, hands: int | None = None) -> set[int]:
    """Return the ranks with which a worker exchanges what is gathered from all."""
    above, below = place_of(rank, size, hands=hands)
    return {*below, *([] if above is None else [above])}


def ring_neighbours(rank: int, size: int) -> set[int]:
    return {(rank - 1) % size, (rank + 1) % size}


def sum_places(index: int, size: int, chunks: int, turn: int) -> list[Place]:
    """Along which tree each chunk of a sum over a group goes, for its member `index`.

    In a small group each chunk has one member that adds it up and tells all others; `turn` says
    whose the first is. In a large one, what is one chunk goes along the flat tree, and what are
    many from member to member, each of which then sends and adds as much as any other.
    """
    if size <= MOST_MESHED:
        return [place_of(index, size, (turn + part) % size, size - 1) for part in range(chunks)]
    return [place_of(index, size) if chunks == 1 else place_of(index, size, hands=1)] * chunks


def sum_neighbours(index: int, size: int) -> set[int]:
    """Return the members with which a member of a group exchanges something in sums."""
    if size <= MOST_MESHED:
        return set(range(size)) - {index}
    return tree_neighbours(index, size) | tree_neighbours(index, size, hands=1)

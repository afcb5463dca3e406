"""Rounds of pair measurements: each node is in one pair at a time. Pure."""

from collections.abc import Sequence

#: Most nodes of which all pairs are measured. Larger clusters: a ring, and some rounds of other
#: pairs.
ALL_UP_TO = 16
_FURTHER_ROUNDS = 4

Pair = tuple[str, str]


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of pairs; no node is in two pairs of a round.

    A few nodes get all pairs, once each (the circle method). In a large cluster each node meets its
    two neighbours in the order of names, and others across.
    """
    names = sorted(nodes)
    if len(names) < 2:
        return []
    if len(names) <= ALL_UP_TO:
        return _all(names)
    ring = [names[i : i + 2] for i in range(0, len(names) - 1, 2)]
    others = [names[i : i + 2] for i in range(1, len(names) - 1, 2)]
    if len(names) % 2:
        found = [ring, others, [[names[-1], names[0]]]]
    else:
        found = [ring, [*others, [names[-1], names[0]]]]
    chosen = [[(pair[0], pair[1]) for pair in one] for one in found]
    everything = _all(names)
    # Spread over the rounds of all pairs, so that near and far pairs are included.
    step = len(everything) // _FURTHER_ROUNDS
    known = {frozenset(pair) for one in chosen for pair in one}
    for index in range(_FURTHER_ROUNDS):
        pairs = [p for p in everything[index * step] if frozenset(p) not in known]
        known |= {frozenset(pair) for pair in pairs}
        chosen.append(pairs)
    return chosen


def _all(names: Sequence[str]) -> list[list[Pair]]:
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) if a < b else (b, a) for a, b in facing if a and b])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found

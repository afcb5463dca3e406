"""Exactly p items of exactly N size with the most value: a knapsack that counts its items.

Owns the search for sizes that do a batch within a given time: `values` are micro-batches that a
pipeline of each size does by then. Must not know the meaning of sizes and values.

The upper hull of the points (size, value) at N/p, times p, bounds the value of any p items. Its
corners a and b beside N/p have the most value per item; every other item loses against the line
through them. Counted modulo b - a, a selection is the loss of a few such items whose sizes make up
the remainder of N, and the rest is a's and b's. This is the group relaxation of the knapsack
(Gomory, 1965), a shortest path over b - a remainders.

Its answer is exact if the numbers of a and b that it leaves are not negative, as is usual for more
than a few items. Else a table over part of the items decides, or over all of them where it is small
enough.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Cells of the table, items x size x kinds: some milliseconds.
_TABLE_CELLS = 1 << 20


class Kind(NamedTuple):
    """Items of this size and value, in any number."""

    size: int
    value: int


def select(kinds: Sequence[Kind], *, items: int, size: int, worth: int) -> tuple[int, ...] | None:
    """Return sizes, biggest first, of so many items with `size` in total and a value of at least
    `worth`; None: there are none.

    `kinds` rise in size. The answer is exact where items x size x kinds is at most a million (100
    items of 10 kinds for 1,000). Beyond that a None may rarely be wrong. Only kinds that lose no
    more than the slack of the bound matter.
    """
    if not kinds or not items * kinds[0].size <= size <= items * kinds[-1].size:
        return None
    low, high = _around(_hull(kinds), items, size)
    span = high.size - low.size
    if span == 0:
        return (low.size,) * items if items * low.value >= worth else None
    # All values are times `span` from here on, so that the line through both has integer values.
    above = size - items * low.size
    bound = above * high.value + (items * span - above) * low.value
    spare = bound - worth * span
    if spare < 0:
        return None
    slope = high.value - low.value
    losses = [(k, (low.value - k.value) * span + slope * (k.size - low.size)) for k in kinds]
    usable = [(kind, loss) for kind, loss in losses if loss <= spare]
    others = _cheapest_detour(usable, low.size, span, above % span, spare)
    if others is None:
        return None
    bigger, rest = divmod(above - sum(s - low.size for s in others), span)
    assert rest == 0, "the detour makes up the remainder"
    smaller = items - len(others) - bigger
    if bigger >= 0 and smaller >= 0:
        sizes = (*(high.size,) * bigger, *others, *(low.size,) * smaller)
        return tuple(sorted(sizes, reverse=True))
    table = [kind for kind, _ in usable]
    return _by_table(table, low, high, items=items, size=size, worth=worth)


def _hull(kinds: Sequence[Kind]) -> list[Kind]:
    """Return the corners of the upper hull."""
    hull: list[Kind] = []
    for kind in kinds:
        while len(hull) > 1 and _below(hull[-2], hull[-1], kind):
            hull.pop()
        hull.append(kind)
    return hull


def _below(left: Kind, middle: Kind, right: Kind) -> bool:
    """Return whether `middle` is on or below the line through the others."""
    rise = (right.value - left.value) * (middle.size - left.size)
    return (middle.value - left.value) * (right.size - left.size) <= rise


def _around(hull: Sequence[Kind], items: int, size: int) -> tuple[Kind, Kind]:
    """Return the corners beside size/items; the same one twice if it is exactly there."""
    for low, high in pairwise(hull):
        if items * low.size == size:
            return low, low
        if size < items * high.size:
            return low, high
    return hull[-1], hull[-1]


def _cheapest_detour(
    losses: Sequence[tuple[Kind, int]], base: int, span: int, remainder: int, spare: int
) -> tuple[int, ...] | None:
    """Return sizes of items that make up the remainder (of sizes less `base`, modulo `span`) at the
    least loss, with the fewest items among ties. Return None if that loses more than `spare`."""
    if remainder == 0:
        return ()
    best: dict[int, tuple[int, int]] = {}
    for kind, loss in losses:
        step = (kind.size - base) % span
        if step and (step not in best or loss < best[step][0]):
            best[step] = loss, kind.size
    # Dijkstra from 0 over the remainders: loss, items, and the last item of the path.
    last: dict[int, int] = {}
    least = {0: 0}
    ways = [(0, 0, 0, 0)]
    while ways:
        loss, count, item, here = heappop(ways)
        if here in last:
            continue
        last[here] = item
        if here == remainder:
            break
        for step, (more, size) in best.items():
            there = (here + step) % span
            if loss + more <= least.get(there, spare):
                least[there] = loss + more
                heappush(ways, (loss + more, count + 1, size, there))
    if remainder not in last:
        return None
    sizes = []
    while remainder:
        sizes.append(last[remainder])
        remainder = (remainder - last[remainder] + base) % span
    return tuple(sizes)


def _by_table(
    kinds: Sequence[Kind], low: Kind, high: Kind, *, items: int, size: int, worth: int
) -> tuple[int, ...] | None:
    """Solve by (max, +) steps over as many items as the table has room for; the rest is low and
    high. Return None where there is no answer, or its value is less than `worth`."""
    free = items
    if items * size * len(kinds) > _TABLE_CELLS:
        free = math.isqrt(_TABLE_CELLS * items // (size * len(kinds)))
    above = size - items * low.size
    fixed_high = (items - free) * above // (items * (high.size - low.size))
    fixed_low = items - free - fixed_high
    rest = size - fixed_high * high.size - fixed_low * low.size
    found = _best_of_all(kinds, free, rest)
    fixed_value = fixed_high * high.value + fixed_low * low.value
    if found is None or found[0] + fixed_value < worth:
        return None
    sizes = (*found[1], *(high.size,) * fixed_high, *(low.size,) * fixed_low)
    return tuple(sorted(sizes, reverse=True))


def _best_of_all(
    kinds: Sequence[Kind], items: int, size: int
) -> tuple[int, tuple[int, ...]] | None:
    """Return the most value of that many items with `size` in total, and their sizes."""
    sizes = np.array([kind.size for kind in kinds])
    gains = np.array([kind.value for kind in kinds])[:, None]
    # Padding before the first place stays unreachable.
    pad = int(sizes.max())
    nothing = np.iinfo(np.int64).min // 2
    values: NDArray[np.int64] = np.full(pad + size + 1, nothing, dtype=np.int64)
    values[pad] = 0
    source = np.arange(pad, pad + size + 1) - sizes[:, None]
    last = np.empty((items, size + 1), dtype=np.intp)
    for item in range(items):
        totals = values[source] + gains
        totals.argmax(axis=0, out=last[item])
        values[pad:] = np.maximum(totals.max(axis=0), nothing)
    if values[pad + size] < 0:
        return None
    chosen = []
    for item in reversed(range(items)):
        chosen.append(kinds[last[item, size]].size)
        size -= chosen[-1]
    return int(values[-1]), tuple(chosen)

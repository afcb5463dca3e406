"""The best sizes of a given number of pipelines that use all nodes.

For p pipelines and a time bound, each size does so many micro-batches. So whether p pipelines can
do the batch is a knapsack of p items (the first part of this module), and the least time
follows by bisection. Gradient sync depends on p and on the template with the most gradients per
GPU, so each template in turn is fixed as that one. A linear program bounds each such question from
below.

The result is exact where the knapsack is, until the search has taken long (`SizeSearch.slack`). The
formulas are in `oobleck.planner.cost.stages`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.cost.stages import PipelineCost, sync_ticks
from oobleck.planner.search.demand import Costs, Demand, Sizes, makespan

# ---- Exactly p items of exactly N size with the most value: a knapsack that counts its items.
#
# Owns the search for sizes that do a batch within a given time: `values` are micro-batches that a
# pipeline of each size does by then.
#
# The upper hull of the points (size, value) at N/p, times p, bounds the value of any p items. Its
# corners a and b beside N/p have the most value per item; every other item loses against the line
# through them. Counted modulo b - a, a selection is the loss of a few such items whose sizes make
# up the remainder of N, and the rest is a's and b's. This is the group relaxation of the knapsack
# (Gomory, 1965), a shortest path over b - a remainders.
#
# Its answer is exact if the numbers of a and b that it leaves are not negative, as is usual for
# more than a few items. Else a table over part of the items decides, or over all of them where it
# is small enough.


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
    best = _best_of_all(kinds, free, rest)
    fixed_value = fixed_high * high.value + fixed_low * low.value
    if best is None or best[0] + fixed_value < worth:
        return None
    sizes = (*best[1], *(high.size,) * fixed_high, *(low.size,) * fixed_low)
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


Floats = NDArray[np.float64]

#: Slack after `be_quick`: further candidates need not be the very best of their number of
#: pipelines.
ROUGH = Fraction(5, 1000)
EXACT = Fraction(0)
#: After so many sizes in knapsacks only a gain of more than CLOSE is searched for. With next to no
#: gradient sync, hundreds of numbers of pipelines differ by less.
_PATIENCE = 4000
CLOSE = Fraction(1, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSizes:
    """Fastest sizes of one number of pipelines."""

    sizes: Sizes
    #: Ticks of a step.
    step: int


class SizeSearch:
    """Search for the best sizes, for one number of pipelines after the other."""

    def __init__(self, demand: Demand, slack: Fraction) -> None:
        costs = demand.costs
        self._costs = costs
        self._nodes = demand.nodes
        self._microbatches = demand.microbatches
        self._links = demand.links
        self._slack = slack
        #: Sizes in all knapsacks so far: a measure of the time spent.
        self.looked_at = 0
        #: Templates by gradients per GPU: fastest sync first.
        self._order = sorted(costs, key=lambda size: (costs[size].gradient_bytes, size))
        self._sizes = np.array(self._order, dtype=float)
        self._first = np.array([costs[size].first for size in self._order], dtype=float)
        self._period = np.array([costs[size].period for size in self._order], dtype=float)
        self._period = np.maximum(self._period, 1e-3)  # rates must be finite
        self._gradients = np.array(
            [costs[size].gradient_bytes for size in self._order], dtype=float
        )
        self._later = np.triu_indices(len(self._order), k=1)

    def be_quick(self) -> None:
        """Accept rough answers from now on."""
        self._slack = ROUGH

    def floors(self, pipelines: int) -> Floats:
        """Return lower bounds, one for each place in the order of gradients: no step of templates
        up to there, with that one's sync, takes fewer ticks.

        Pipelines and micro-batches may be fractional here. That is a linear program in the numbers
        of pipelines with two constraints, solved by two sizes beside nodes/pipelines.
        """
        average = self._nodes / pipelines
        low, high = (
            np.flatnonzero(side) for side in (self._sizes < average, self._sizes > average)
        )
        time = np.full((len(self._order), len(self._order)), np.inf)
        if len(low) and len(high):
            small, big = self._sizes[low][:, None], self._sizes[high]
            many_high = (self._nodes - pipelines * small) / (big - small)
            rate_low = (pipelines - many_high) / self._period[low][:, None]
            rate_high = many_high / self._period[high]
            first_low, first_high = self._first[low][:, None], self._first[high]
            work = self._microbatches - pipelines + rate_low * first_low + rate_high * first_high
            within = work / (rate_low + rate_high)
            time[np.ix_(low, high)] = np.maximum(within, np.maximum(first_low, first_high))
        even = np.flatnonzero(self._sizes == average)
        more = self._microbatches / pipelines - 1
        time[even, even] = self._first[even] + more * self._period[even]
        pairs = np.minimum(time, time.T)
        pairs[self._later] = np.inf
        compute = np.minimum.accumulate(pairs.min(axis=1))
        # Sync is linear in the bytes.
        none, most = (
            sync_ticks(int(count), pipelines=pipelines, links=self._links)
            for count in (0, self._gradients[-1])
        )
        sync = none + (most - none) * (self._gradients / max(1.0, self._gradients[-1]))
        floors: Floats = (compute + sync) * _ROUNDED_DOWN - 1
        return floors

    def best(self, pipelines: int, floors: Floats, limit: int | None) -> BestSizes | None:
        """Return the fastest sizes of exactly that many pipelines, if a step takes at most `limit`
        ticks.

        Each template in turn is fixed as the one with the slowest sync, lowest floor first.
        """
        best: BestSizes | None = None
        if limit is not None and self._hopeless(pipelines, floors, limit):
            return None
        for index in map(int, np.argsort(floors, kind="stable")):
            if not np.isfinite(floors[index]):
                break
            if limit is None:
                limit = self._reachable(pipelines, index, int(floors[index]))
            if limit is None:
                continue
            if floors[index] > limit:
                break
            slowest = self._sync(self._order[index], pipelines)
            fastest = self._least_time(self._up_to(index), pipelines, limit - slowest)
            if fastest is not None:
                time, sizes = fastest
                step = time + max(self._sync(size, pipelines) for size in set(sizes))
                best = BestSizes(sizes=sizes, step=step)
                limit = step - max(1, int(step * self.slack))
        return best

    def _hopeless(self, pipelines: int, floors: Floats, limit: int) -> bool:
        """Return whether all templates together, with the least sync of any, are too slow for
        `limit`.

        It counts as time spent only where it replaces the other knapsacks of that number. Otherwise
        `slack` would grow earlier and allow slightly slower sizes.
        """
        open_places = np.flatnonzero(floors <= limit)
        if not len(open_places):
            return True
        sync = self._sync(self._order[open_places[0]], pipelines)
        spent = self.looked_at
        if self._select(self._up_to(int(open_places[-1])), pipelines, limit - sync) is None:
            return True
        self.looked_at = spent
        return False

    @property
    def slack(self) -> Fraction:
        """Share of a step time that is not worth more search."""
        return self._slack or (CLOSE if self.looked_at > _PATIENCE else EXACT)

    def _reachable(self, pipelines: int, index: int, floor: int) -> int | None:
        """Return a step time that suffices for the templates up to `index`; None where there is
        none."""
        allowed = self._up_to(index)
        latest = max(cost.time(self._microbatches) for cost in allowed.values())
        time = max(1, floor + max(cost.period for cost in allowed.values()))
        while self._select(allowed, pipelines, time) is None:
            if time >= latest:
                return None
            time *= 2
        return time + self._sync(self._order[index], pipelines)

    def _up_to(self, index: int) -> Costs:
        """Return costs by ascending size of the templates up to a place in the order of
        gradients.
        """
        return {size: self._costs[size] for size in sorted(self._order[: index + 1])}

    def _sync(self, size: int, pipelines: int) -> int:
        count = self._costs[size].gradient_bytes
        return sync_ticks(count, pipelines=pipelines, links=self._links)

    def _least_time(self, allowed: Costs, pipelines: int, limit: int) -> tuple[int, Sizes] | None:
        """Return the least time, up to `limit`, within which the pipelines can do the batch, and
        their sizes.

        Each answer of the knapsack moves a bound to the next change of capacities. A yes moves it
        to the real time of the sizes, a no to the next micro-batch that any template finishes.
        After a yes the steps down double, since the result is mostly near the limit.
        """
        low = -1
        high, best = limit + 1, None
        time, step = limit, max(1, min(cost.period for cost in allowed.values()))
        while low + 1 < high - high * self.slack:
            sizes = self._select(allowed, pipelines, time)
            if sizes is not None:
                high = makespan(Counter(allowed[size] for size in sizes), self._microbatches)
                best = high, sizes
            else:
                low = _next_change(allowed, time) - 1
            time = max(high - step, low + 1) if low < 0 else (low + high) // 2
            step *= 2
        return best

    def _select(self, allowed: Costs, pipelines: int, time: int) -> Sizes | None:
        kinds = [
            Kind(size, capacity)
            for size, cost in allowed.items()
            if (capacity := cost.capacity(time, self._microbatches))
        ]
        self.looked_at += len(kinds)
        return select(kinds, items=pipelines, size=self._nodes, worth=self._microbatches)


_NEVER = 1 << 200
#: Covers rounding up in floating point.
_ROUNDED_DOWN = 1 - 1e-9


def _next_change(allowed: Costs, time: int) -> int:
    """Return the first tick after `time` at which some template finishes one more micro-batch."""
    return min(_next_done(cost, time) for cost in allowed.values())


def _next_done(cost: PipelineCost, time: int) -> int:
    if time < cost.first:
        return cost.first
    if cost.period == 0:
        return _NEVER
    return cost.first + ((time - cost.first) // cost.period + 1) * cost.period

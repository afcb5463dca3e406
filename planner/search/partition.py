"""Cuts of a model into stages for every number of nodes at once: the recursion under templates.

Goes over the layers from the last to the first. For each number of GPUs used so far it keeps the
least cost of covering the layers from there on. Owns how costs add up while no stage takes longer
than a bound. Must not know which bounds to try: `oobleck.planner.search.templates` searches.

Arrays are indexed by layer, row (a bound on the slowest stage), node and GPUs used in that node,
nodes counted from the model's end.
"""

from dataclasses import dataclass

import numpy as np

from oobleck.planner.cost.stages import Floats, Integers, StageTable

#: Numbers that are added at a time, so that they stay in the cache.
_BLOCK_NUMBERS = 2**16
#: Largest ratio of bounds of rows that are swept together: each row costs as much as the one with
#: the longest stages.
_ALIKE = 2.0
#: Numbers in the arrays of one sweep; up to the fewer, the ratio is ignored.
_FEW_NUMBERS, _MOST_NUMBERS = 300_000, 4_000_000


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bounds:
    """Rows of a sweep: the slowest stage takes between `low` and `high`.

    Stages after it take at most `after`. With `stages_after`, every row has the same bounds, and
    row a counts the cuts with exactly a stages from a layer on: memory is exact then. Otherwise it
    is judged by the fewest stages that may follow.
    """

    low: Floats
    high: Floats
    after: Floats
    stages_after: bool = False


def swept_together(table: StageTable, high: Floats, nodes: Integers) -> int:
    """Return how many of the first rows, at least one, a sweep should take, as memory and the ratio
    of rows allow.

    `high` rises; `nodes` is the most nodes that a row is wanted for.
    """
    row = 2 * (table.layers + 1) * (table.per_node + 1) * np.maximum.accumulate(nodes)
    numbers = np.arange(1, len(high) + 1) * row
    unlike = (numbers > _FEW_NUMBERS) & (high > _ALIKE * high[0])
    stop = np.flatnonzero(unlike | (numbers > _MOST_NUMBERS))
    return max(1, int(stop[0])) if len(stop) else len(high)


class Sweep:
    """Least costs under `bounds` for up to `nodes` nodes, `least` at least.

    Let the slowest stage take t*, with 4 micro-batches per stage (Oobleck §4.1.2). A stage before
    it costs its time + 4 t*, the slowest 4 t*, one after it twice its time + 3 t*. Here t* counts
    as `low`, so that the result is exact where low = high and a lower bound elsewhere. `costs[1]`
    has the slowest stage placed, `costs[0]` not yet.
    """

    def __init__(
        self, table: StageTable, fewest: Integers, bounds: Bounds, *, nodes: int, least: int
    ) -> None:
        self.table, self.fewest, self.bounds = table, fewest, bounds
        self._rows = len(bounds.low)
        shape = (2, table.layers + 1, self._rows, nodes, table.per_node + 1)
        self.costs = np.full(shape, np.inf)
        self.costs[0, table.layers, : 1 if bounds.stages_after else None, 0, 0] = 0.0
        reach = (table.time <= bounds.high.max()).sum(2)
        for i in range(table.layers - 1, -1, -1):
            window = slice(max(0, least - i - 1), min(nodes, table.layers - i))
            for k in range(len(table.choices)):
                if reach[k, i]:
                    self._add_stages(i, k, i + 1 + int(reach[k, i]), window)
            self.costs[:, i, :, 1:, 0] = self.costs[:, i, :, :-1, table.per_node]

    def totals(self, nodes: Integers) -> Floats:
        """Return T by row and number of nodes."""
        return self.costs[1, 0, :, nodes - 1, self.table.per_node].T

    def _add_stages(self, i: int, k: int, stop: int, window: slice) -> None:
        """Put stages of layers i .. j-1, j < stop, on choices[k] GPUs before the existing ones."""
        slots = self.table.per_node - self.table.choices[k] + 1
        numbers = self._rows * (window.stop - window.start) * slots
        step = max(1, _BLOCK_NUMBERS // max(1, numbers))
        costs = self._stage_costs(i, k, slice(i + 1, stop))
        for first in range(i + 1, stop, step):
            self._add_block(i, k, slice(first, min(first + step, stop)), window, costs)

    def _add_block(
        self, i: int, k: int, block: slice, window: slice, costs: tuple[Floats, Floats, Floats]
    ) -> None:
        gpus, per_node = self.table.choices[k], self.table.per_node
        # Rows rise: those before are too fast for the shortest of these stages.
        first_row = int(np.searchsorted(self.bounds.high, self.table.time[k, i, block.start]))
        shift = int(self.bounds.stages_after)
        rows = slice(first_row, self._rows - shift)
        into = self.costs[:, i, first_row + shift :, window, gpus:]
        source = self.costs[:, block, rows, window, : per_node - gpus + 1]
        penalty = self._penalty(i, k, block, window)
        if penalty is not None:
            source = source + penalty
        own = slice(block.start - i - 1, block.stop - i - 1)
        after, before, slowest = (cost[own, rows] for cost in costs)
        np.minimum(into[0], (source[0] + after).min(0), out=into[0])
        np.minimum(into[1], (source[1] + before).min(0), out=into[1])
        placed = np.flatnonzero(np.isfinite(slowest).any((1, 2, 3)))
        if len(placed):
            some = slice(placed[0], placed[-1] + 1)
            np.minimum(into[1], (source[0, some] + slowest[some]).min(0), out=into[1])

    def _stage_costs(self, i: int, k: int, block: slice) -> tuple[Floats, Floats, Floats]:
        """Return by [stop, row, 1, 1] the stage's cost after, before and as the slowest."""
        bounds = self.bounds
        time = self.table.time[k, i, block, None]
        low = bounds.low
        fits = time <= bounds.high
        if bounds.stages_after:
            fits &= self.table.room[k, i, block, None] > np.arange(self._rows)
        after = np.where(fits & (time <= bounds.after), 2 * time + 3 * low, np.inf)
        before = np.where(fits, time + 4 * low, np.inf)
        slowest = np.where(fits & (time >= low), time + 3 * low, np.inf)
        return after[..., None, None], before[..., None, None], slowest[..., None, None]

    def _penalty(self, i: int, k: int, block: slice, window: slice) -> Floats | None:
        """Return infinity where a stage has too little memory, even with the fewest later stages;
        None: it has enough everywhere."""
        if self.bounds.stages_after:
            return None
        room = self.table.room[k, i, block]
        if room.min() >= self.table.layers:
            return None
        stop = self.table.per_node - self.table.choices[k] + 1
        wrong = room[:, None, None] <= self.fewest[block, window, :stop]
        return np.where(wrong, np.inf, 0.0)[:, None] if wrong.any() else None

"""Tracing back from a sweep to the cuts of least cost, many at once.

Owns the way back. Must not know the meaning of costs; `Cuts.totals` has T for whole cuts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.cost.stages import Floats, Integers, Stages, StageTable
from oobleck.planner.search.partition import Sweep


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cuts:
    """Whole cuts by [cut, stage], with `counts` stages each."""

    table: StageTable
    counts: Integers
    first: Integers
    stop: Integers
    choice: Integers

    def __len__(self) -> int:
        return len(self.counts)

    def stages(self, number: int) -> Stages:
        """Return the stages of cut `number`."""
        return tuple(
            (int(self.first[number, s]), int(self.stop[number, s]), self._gpus(number, s))
            for s in range(int(self.counts[number]))
        )

    def _gpus(self, number: int, stage: int) -> int:
        return self.table.choices[int(self.choice[number, stage])]

    def totals(self) -> Floats:
        """Return T1 + T2 + T3 with 4 micro-batches per stage; infinite where memory is too
        small.
        """
        stage = np.arange(self.first.shape[1])
        real = stage < self.counts[:, None]
        time = np.where(real, self.table.time[self.choice, self.first, self.stop], -1.0)
        slowest = time.max(1)
        # Ties go to the last one.
        last = self.first.shape[1] - 1 - (time == slowest[:, None])[:, ::-1].argmax(1)
        time = np.where(real, time, 0.0)
        after = np.where(stage >= last[:, None], time, 0.0).sum(1)
        total = time.sum(1) + (3 * self.counts + last - 1) * slowest + after
        room = self.table.room[self.choice, self.first, self.stop]
        in_flight = self.counts[:, None] - stage
        return np.where((room >= in_flight).all(1, where=real), total, np.inf)


def trace(
    sweep: Sweep, rows: Integers, nodes: Integers, sample: np.random.Generator | None = None
) -> Cuts:
    """Return a cut of least cost for each pair of row and number of nodes, which must have one.

    If there are several, it is the first, or one that `sample` picks.
    """
    walk = _Walk(sweep, rows, nodes, sample)
    while walk.active.any():
        walk.step()
    return walk.cuts()


@dataclass(slots=True, eq=False, kw_only=True)
class _Position:
    """Position of each query: the layers from `layer` on are still uncovered."""

    layer: Integers
    row: Integers
    node: Integers
    slot: Integers
    phase: Integers


class _Walk:
    """Walk along the least costs from the first layer on, one stage at a time, for all queries at
    once.
    """

    def __init__(
        self,
        sweep: Sweep,
        rows: Integers,
        nodes: Integers,
        sample: np.random.Generator | None,
    ) -> None:
        self._sweep, self._table, self._sample = sweep, sweep.table, sample
        count = len(rows)
        self._at = _Position(
            layer=np.zeros(count, dtype=np.int64),
            row=rows.copy(),
            node=nodes - 1,
            slot=np.full(count, self._table.per_node),
            phase=np.ones(count, dtype=np.int64),
        )
        self._stages: list[tuple[Integers, Integers, Integers, Integers]] = []

    @property
    def active(self) -> NDArray[np.bool_]:
        return self._at.layer < self._table.layers

    def step(self) -> None:
        queries = np.flatnonzero(self.active)
        at = _Position(
            layer=self._at.layer[queries],
            row=self._at.row[queries],
            node=self._at.node[queries],
            slot=self._at.slot[queries],
            phase=self._at.phase[queries],
        )
        reach = self._reach(at)
        options = [self._options(at, k, reach) for k in range(len(self._table.choices))]
        costs = np.stack([cost for _, cost in options], axis=1)  # [query, k, kind, stop]
        flat = costs.reshape(len(queries), -1)
        best = flat == flat.min(1, keepdims=True)
        weight = best if self._sample is None else best * self._sample.random(best.shape)
        k, kind, stop = np.unravel_index(weight.argmax(1), costs.shape[1:])
        self._take(queries, at, k, kind, options[0][0][np.arange(len(queries)), stop])

    def _options(self, at: _Position, k: int, reach: int) -> tuple[Integers, Floats]:
        """Return the ends of a stage on choices[k] GPUs by [query, stop], and the cost from there
        on by [query, 2, stop]. The two are: as a stage before or after the slowest, and as the
        slowest."""
        sweep = self._sweep
        table, bounds = sweep.table, sweep.bounds
        stops = at.layer[:, None] + np.arange(1, reach + 1)
        inside = np.minimum(stops, table.layers)
        time = np.where(stops <= table.layers, table.time[k, at.layer[:, None], inside], np.inf)
        room = table.room[k, at.layer[:, None], inside]
        source_row = at.row - int(bounds.stages_after)
        low, high = bounds.low[source_row][:, None], bounds.high[source_row][:, None]
        placed = at.phase[:, None] == 1
        slot = at.slot - table.choices[k]
        where = (inside, source_row[:, None], at.node[:, None], np.maximum(slot, 0)[:, None])
        if bounds.stages_after:
            held = room > source_row[:, None]
        else:
            held = room > sweep.fewest[where[0], where[2], where[3]]
        held &= (slot >= 0)[:, None] & (time <= high)
        after = np.where(time <= bounds.after[source_row][:, None], 2 * time + 3 * low, np.inf)
        beside = np.where(placed, time + 4 * low, after)
        slowest = np.where(placed & (time >= low), time + 3 * low, np.inf)
        phase = at.phase[:, None]
        costs = np.stack(
            [sweep.costs[phase, *where] + beside, sweep.costs[0, *where] + slowest], axis=1
        )
        return inside, np.where(held[:, None], costs, np.inf)

    def _reach(self, at: _Position) -> int:
        """Return the most layers that the next stage of any query may have."""
        high = self._sweep.bounds.high[at.row][:, None]
        return int((self._table.time[:, at.layer] <= high).sum(2).max())

    def _take(
        self, queries: Integers, at: _Position, k: Integers, kind: Integers, stop: Integers
    ) -> None:
        self._stages.append((queries, at.layer, stop, k))
        slot = at.slot - np.array(self._table.choices)[k]
        opened = (slot == 0) & (at.node > 0)
        to = self._at
        to.layer[queries] = stop
        to.node[queries] = at.node - opened
        to.slot[queries] = np.where(opened, self._table.per_node, slot)
        to.phase[queries] = np.where(kind == 1, 0, at.phase)
        to.row[queries] = at.row - int(self._sweep.bounds.stages_after)

    def cuts(self) -> Cuts:
        shape = (len(self._at.layer), len(self._stages))
        first, stop, choice = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        counts = np.zeros(shape[0], dtype=np.int64)
        for number, (queries, begin, end, k) in enumerate(self._stages):
            first[queries, number] = begin
            stop[queries, number] = end
            choice[queries, number] = k
            counts[queries] = number + 1
        return Cuts(table=self._table, counts=counts, first=first, stop=stop, choice=choice)

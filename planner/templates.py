"""Template generation: the cheapest way to cut the model for n nodes (Oobleck §4.1.2).

Minimises T1 + T2 + T3 exactly, for 4 micro-batches per stage, for all n at once. The slowest stage
takes one of the times that some stage has. Intervals of these times are searched from coarse to
fine: a sweep (`oobleck.planner.partition`) gives each interval a lower bound for every n, and the
cut that belongs to the bound has a true T. Only intervals that may still hold a better cut for
some n are divided, down to single times, for which the sweep is exact.

Owns the search. T does not tell all cuts apart: which one of least T becomes the template is for
`oobleck.planner.ties`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.cost import StageCosts, seconds
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.partition import Bounds, Sweep
from oobleck.planner.profile import Profile
from oobleck.planner.stagetable import Floats, Integers, StageTable
from oobleck.planner.template import PipelineTemplate, StageTemplate
from oobleck.planner.trace import Cuts, trace

#: Intervals of a level are no wider than this, so that the first bounds mean something.
_COARSEST = 1.2
#: Parts that an interval is divided into.
_PARTS = 8
#: Intervals up to such a ratio are swept together: every row pays for the longest stages of all.
_ALIKE = 2.0
#: Numbers in the arrays of one sweep; up to the fewer, likeness does not matter.
_FEW_NUMBERS, _MOST_NUMBERS = 300_000, 4_000_000


def generate_templates(profile: Profile, sizes: range) -> Mapping[int, PipelineTemplate]:
    """The best template for each number of nodes in `sizes`; raises PlanInfeasible."""
    table = StageTable(profile)
    best = least_cuts(table, sizes)
    costs, templates = StageCosts(profile), {}
    for nodes in sizes:
        if nodes not in best:
            raise PlanInfeasible(f"no template of {nodes} nodes fits the memory")
        templates[nodes] = _template(costs, profile.gpus_per_node, nodes, best[nodes].stages)
    return templates


def feasible_sizes(profile: Profile, most: int) -> tuple[int, ...]:
    """All numbers of nodes up to `most` that some template fits, ascending."""
    table = StageTable(profile)
    return fitting_sizes(table, table.fewest_stages(min(most, table.layers)))


@dataclass(slots=True, kw_only=True)
class BestCut:
    """The cut of least T for one number of nodes, found so far."""

    total: float
    stages: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    """Times number first .. last may be that of the slowest stage; `bound` is T's, by size."""

    first: int
    last: int
    bound: Floats


def least_cuts(table: StageTable, sizes: Sequence[int]) -> Mapping[int, BestCut]:
    """A cut of least T for every number of nodes of `sizes` that fits the memory."""
    search = _Search(table, [n for n in sizes if n <= table.layers])
    return search.run()


class _Search:
    def __init__(self, table: StageTable, sizes: Sequence[int]) -> None:
        self._table = table
        self._fewest = table.fewest_stages(max(sizes, default=1))
        fitting = set(fitting_sizes(table, self._fewest))
        self._sizes = np.array([n for n in sizes if n in fitting], dtype=np.int64)
        self._times = np.unique(table.time[np.isfinite(table.time)])
        self._least_work = self._work()
        self._best = np.full(len(self._sizes), np.inf)
        self._stages: dict[int, tuple[tuple[int, int, int], ...]] = {}

    def run(self) -> Mapping[int, BestCut]:
        level = self._coarse() if len(self._sizes) else []
        while level:
            level = [part for interval in self._survivors(level) for part in _divide(interval)]
        return {
            int(n): BestCut(total=float(self._best[at]), stages=self._stages[at])
            for at, n in enumerate(self._sizes)
        }

    def _work(self) -> float:
        """GPU time that the model needs at least."""
        single = [
            d * np.diag(t, 1) for d, t in zip(self._table.choices, self._table.time, strict=True)
        ]
        return float(np.min(single, axis=0).sum())

    def _coarse(self) -> list[_Interval]:
        """All times, in intervals of about equal ratio."""
        times = self._times
        bound = np.full(len(self._sizes), -np.inf)
        intervals = []
        first = 0
        while first < len(times):
            stop = max(int(np.searchsorted(times, times[first] * _COARSEST, "right")), first + 1)
            intervals.append(_Interval(first=first, last=stop - 1, bound=bound))
            first = stop
        return intervals

    def _alive(self, interval: _Interval) -> NDArray[np.bool_]:
        """The sizes for which it may hold a better cut: GPUs that are busy for no longer than the
        slowest stage have to do all the work, and at least 3 S + 1 times its time is needed."""
        floor = (3 * self._sizes + 1) * self._times[interval.first]
        gpu_time = self._sizes * self._table.per_node * self._times[interval.last]
        better = np.maximum(interval.bound, floor) < self._best
        alive: NDArray[np.bool_] = better & (gpu_time >= self._least_work)
        return alive

    def _survivors(self, level: Sequence[_Interval]) -> Iterator[_Interval]:
        """Those of more than one time that may hold a better cut, with their lower bounds."""
        bounded = [interval for chunk in self._chunks(level) for interval in self._bound(chunk)]
        return (i for i in bounded if i.first < i.last and self._alive(i).any())

    def _chunks(self, level: Sequence[_Interval]) -> Iterator[list[_Interval]]:
        """Neighbours that are swept together, as many as memory and likeness allow."""
        chunk: list[_Interval] = []
        nodes = 0
        for interval in level:
            alive = self._alive(interval)
            if not alive.any():
                continue
            most = int(self._sizes[alive].max())
            row = 2 * (self._table.layers + 1) * max(nodes, most) * (self._table.per_node + 1)
            wide = (
                len(chunk) * row > _FEW_NUMBERS
                and self._times[interval.last] > _ALIKE * self._times[chunk[0].last]
            )
            if chunk and (wide or (len(chunk) + 1) * row > _MOST_NUMBERS):
                yield chunk
                chunk, nodes = [], 0
            chunk.append(interval)
            nodes = max(nodes, most)
        if chunk:
            yield chunk

    def _bound(self, chunk: Sequence[_Interval]) -> Iterator[_Interval]:
        """Sweep the chunk: better cuts on the way, and its intervals with their bounds."""
        alive = np.array([self._alive(interval) for interval in chunk])
        sizes = self._sizes[alive.any(0)]
        if not len(sizes):
            return
        low = self._times[[interval.first for interval in chunk]]
        high = self._times[[interval.last for interval in chunk]]
        single = low == high
        bounds = Bounds(low=low, high=high, after=np.where(single, high - 1, high))
        sweep = Sweep(
            self._table, self._fewest, bounds, nodes=int(sizes.max()), least=int(sizes.min())
        )
        totals = np.full(alive.shape, np.inf)
        for at in np.flatnonzero(alive.any(0)):
            totals[:, at] = sweep.total(int(self._sizes[at]))
        totals[~alive] = np.inf
        self._improve(sweep, totals)
        for row in np.flatnonzero(single):
            for at in np.flatnonzero(totals[row] < self._best):
                self._count_stages(low[row], int(at))
        for interval, bound in zip(chunk, totals, strict=True):
            yield _Interval(first=interval.first, last=interval.last, bound=bound)

    def _improve(self, sweep: Sweep, totals: Floats) -> None:
        """Take the cuts that belong to each size's least bound where they are better."""
        row = totals.argmin(0)
        at = np.flatnonzero(totals.min(0) < self._best)
        if len(at):
            self._take(at, trace(sweep, row[at], self._sizes[at]))

    def _take(self, at: Integers, cuts: Cuts) -> None:
        totals = cuts.totals()
        for number, index in enumerate(at):
            if totals[number] < self._best[index]:
                self._best[index] = totals[number]
                self._stages[int(index)] = cuts.stages(number)

    def _count_stages(self, time: float, at: int) -> None:
        """The best cut with slowest stage `time` where memory hangs on the number of stages."""
        rows = np.full(self._table.layers + 1, time)
        bounds = Bounds(low=rows, high=rows, after=rows - 1, stages_after=True)
        nodes = int(self._sizes[at])
        sweep = Sweep(self._table, self._fewest, bounds, nodes=nodes, least=nodes)
        totals = sweep.total(nodes)
        if totals.min() < self._best[at]:
            row = np.array([totals.argmin()])
            self._take(np.array([at]), trace(sweep, row, np.array([nodes])))


def fitting_sizes(table: StageTable, fewest: Integers) -> tuple[int, ...]:
    whole = fewest[0, :, table.per_node]
    return tuple(int(n) + 1 for n in np.flatnonzero(whole <= table.layers))


def _divide(interval: _Interval) -> Iterator[_Interval]:
    edges = np.linspace(interval.first, interval.last + 1, _PARTS + 1).astype(int)
    for first, stop in pairwise(edges.tolist()):
        if first < stop:
            yield _Interval(first=first, last=stop - 1, bound=interval.bound)


def _template(
    costs: StageCosts, per_node: int, nodes: int, stages: Sequence[tuple[int, int, int]]
) -> PipelineTemplate:
    times = [costs.time(*stage) for stage in stages]
    slowest = max(range(len(stages)), key=lambda s: (times[s], s))
    total = sum(times) + (3 * len(stages) + slowest - 1) * times[slowest] + sum(times[slowest:])
    made = []
    used = 0
    for first, stop, gpus in stages:
        made.append(
            StageTemplate(
                first_layer=first,
                last_layer=stop - 1,
                node=used // per_node,
                gpus=gpus,
                forward_s=seconds(costs.forward(first, stop, gpus)),
                backward_s=seconds(costs.backward(first, stop, gpus)),
            )
        )
        used += gpus
    return PipelineTemplate(
        nodes=nodes,
        gpus_per_node=per_node,
        stages=tuple(made),
        iteration_s=seconds(total),
    )

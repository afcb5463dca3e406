"""Template generation: the cheapest way to cut the model for n nodes (Oobleck §4.1.2).

Minimises T1 + T2 + T3 exactly, for 4 micro-batches per stage, for all n at once. The slowest
stage's time is that of some possible stage. Intervals of these times are searched from coarse to
fine. A sweep (`oobleck.planner.search.partition`) gives each interval a lower bound for every n,
and the cut of the bound has a true T. Only intervals that may still hold a better cut for some n
are divided, down to single times, for which the sweep is exact.

Many cuts have the same T. Owns the search, and which of them become templates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import PipelineTemplate, StageTemplate
from oobleck.core.profile import Profile
from oobleck.planner.cost.kinds import Kind
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stages import Floats, Integers, Stages, StageTable, seconds
from oobleck.planner.programs.communicators import MOST_COMMUNICATORS, most_links
from oobleck.planner.search.demand import Costed
from oobleck.planner.search.partition import Bounds, Sweep, swept_together
from oobleck.planner.search.trace import Cuts, trace

#: Widest intervals of a level, so that the first bounds are useful.
_COARSEST = 1.2
#: Parts that an interval is divided into.
_PARTS = 8
#: Further cuts that are drawn at random for each number of nodes.
_SAMPLES = 5
#: Micro-batches per stage of a replay: enough to fill, run and drain.
_MICROBATCHES = 2
#: Templates of a size for the first plan to choose among.
_SHORTLISTED = 3
#: Most links of a worker beside its stage's communicator and one for sums.
_MOST_LINKS = MOST_COMMUNICATORS - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortlist:
    """Templates of one size: some of least T, and one that is `evened`. `quickest` and
    `first_found` may be the same."""

    #: Template whose pipeline ends first with micro-batches for all its stages.
    quickest: Costed
    #: First template that the search found.
    first_found: Costed
    #: Next quickest ones, and the evened one.
    others: tuple[Costed, ...] = ()

    @property
    def all(self) -> tuple[Costed, ...]:
        return tuple(dict.fromkeys((self.quickest, self.first_found, *self.others)))


def generate_templates(profile: Profile, sizes: Sequence[int]) -> Mapping[int, PipelineTemplate]:
    """Return the best template for each number of nodes in `sizes`; raises PlanInfeasible."""
    return {
        nodes: few.quickest.template for nodes, few in shortlisted_templates(profile, sizes).items()
    }


def shortlisted_templates(profile: Profile, sizes: Sequence[int]) -> Mapping[int, Shortlist]:
    """Return a few templates of least T for each number of nodes, and an evened one. Raises
    PlanInfeasible."""
    table = StageTable(profile)
    sums = list(accumulate((layer.summed_bytes for layer in profile.layers), initial=0))
    candidates, even = [], []
    for nodes, cuts in least_cuts(table, sizes).items():
        candidates.append([Costed(template_of(table, nodes, cut), profile) for cut in cuts])
        cut = evened(table, sums, cuts[0])
        more = () if cut in cuts else (Costed(template_of(table, nodes, cut), profile),)
        even.append(more)
    return {
        few.quickest.template.nodes: replace(few, others=(*few.others, *more))
        for few, more in zip(shortlists(candidates), even, strict=True)
    }


def feasible_sizes(profile: Profile, most: int) -> tuple[int, ...]:
    """Return all numbers of nodes up to `most` that some template fits, ascending."""
    table = StageTable(profile)
    return fitting_sizes(table, table.fewest_stages(min(most, table.layers)))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Intervals:
    """Intervals of times: the slowest stage has one of times first .. last. `bound` [interval,
    size] is then a lower bound of T."""

    first: Integers
    last: Integers
    bound: Floats

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, which: slice | Integers | NDArray[np.bool_]) -> "_Intervals":
        return _Intervals(first=self.first[which], last=self.last[which], bound=self.bound[which])

    def divided(self) -> "_Intervals":
        """Return parts of about equal numbers of times, in order, with the bounds of the whole."""
        parts = np.arange(_PARTS + 1)
        edges = self.first[:, None] + (self.last + 1 - self.first)[:, None] * parts // _PARTS
        real = edges[:, :-1] < edges[:, 1:]
        return _Intervals(
            first=edges[:, :-1][real],
            last=edges[:, 1:][real] - 1,
            bound=np.repeat(self.bound, real.sum(1), axis=0),
        )


def least_cuts(table: StageTable, sizes: Sequence[int]) -> Mapping[int, tuple[Stages, ...]]:
    """Return the cuts of least T for every number of nodes; several where they are equal.

    Raises PlanInfeasible.
    """
    fewest = table.fewest_stages(min(max(sizes, default=1), table.layers))
    fitting = set(fitting_sizes(table, fewest))
    for nodes in sizes:
        if nodes not in fitting:
            raise PlanInfeasible(f"no template of {nodes} nodes fits the memory")
    least = _Search(table, fewest, sizes).run()
    return equal_cuts(table, fewest, least) if least else {}


class _Search:
    def __init__(self, table: StageTable, fewest: Integers, sizes: Sequence[int]) -> None:
        self._table, self._fewest = table, fewest
        self._sizes = np.array(sizes, dtype=np.int64)
        self._times = np.unique(table.time[np.isfinite(table.time)])
        self._least_work = self._work()
        self._best = np.full(len(self._sizes), np.inf)
        self._stages: dict[int, Stages] = {}

    def run(self) -> Mapping[int, tuple[float, Stages]]:
        """Return the least T and a cut of that T, by number of nodes."""
        level = self._coarse()
        while len(level):
            level = self._survivors(level).divided()
        return {
            int(n): (float(self._best[at]), self._stages[at]) for at, n in enumerate(self._sizes)
        }

    def _work(self) -> float:
        """Return the least GPU time of the model."""
        single = [
            d * np.diag(t, 1) for d, t in zip(self._table.choices, self._table.time, strict=True)
        ]
        return float(np.min(single, axis=0).sum())

    def _coarse(self) -> _Intervals:
        """Return all times, in intervals of about equal ratio."""
        times, edges = self._times, [0]
        while edges[-1] < len(times):
            stop = int(np.searchsorted(times, times[edges[-1]] * _COARSEST, "right"))
            edges.append(max(stop, edges[-1] + 1))
        return _Intervals(
            first=np.array(edges[:-1], dtype=np.int64),
            last=np.array(edges[1:], dtype=np.int64) - 1,
            bound=np.full((len(edges) - 1, len(self._sizes)), -np.inf),
        )

    def _alive(self, level: _Intervals) -> NDArray[np.bool_]:
        """Return by [interval, size] whether it may hold a better cut. GPUs that are busy no longer
        than the slowest stage must do all the work, and T is at least 3 S + 1 times its time."""
        low, high = self._times[level.first, None], self._times[level.last, None]
        floor = (3 * self._sizes + 1) * low
        can = self._sizes * self._table.per_node * high >= self._least_work
        alive: NDArray[np.bool_] = can & (np.maximum(level.bound, floor) < self._best)
        return alive

    def _survivors(self, level: _Intervals) -> _Intervals:
        """Return the intervals of more than one time that may hold a better cut, with their lower
        bounds."""
        done = 0
        while done < len(level):
            alive = self._alive(level[done:])
            rows = np.flatnonzero(alive.any(1))
            if not len(rows):
                level.bound[done:] = np.inf
                break
            rows = rows[: self._together(level[done + rows], alive[rows])]
            level.bound[done : done + int(rows[-1]) + 1] = np.inf
            level.bound[done + rows] = self._bound(level[done + rows], alive[rows])
            done += int(rows[-1]) + 1
        return level[(level.first < level.last) & (level.bound < self._best).any(1)]

    def _together(self, level: _Intervals, alive: NDArray[np.bool_]) -> int:
        """Return how many of the intervals are swept together."""
        return swept_together(
            self._table, self._times[level.last], np.where(alive, self._sizes, 0).max(1)
        )

    def _bound(self, level: _Intervals, alive: NDArray[np.bool_]) -> Floats:
        """Return the bounds of all intervals by one sweep; adopt better cuts found on the way."""
        sizes = self._sizes[alive.any(0)]
        low, high = self._times[level.first], self._times[level.last]
        single = low == high
        bounds = Bounds(low=low, high=high, after=np.where(single, high - 1, high))
        sweep = Sweep(
            self._table, self._fewest, bounds, nodes=int(sizes.max()), least=int(sizes.min())
        )
        totals = np.full(alive.shape, np.inf)
        totals[:, alive.any(0)] = sweep.totals(sizes)
        totals[~alive] = np.inf
        self._improve(sweep, totals)
        for row in np.flatnonzero(single):
            for at in np.flatnonzero(totals[row] < self._best):
                self._count_stages(low[row], int(at))
        return totals

    def _improve(self, sweep: Sweep, totals: Floats) -> None:
        """Adopt the cuts of each size's least bound where they are better."""
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
        """Find the best cut with slowest stage `time` where memory depends on the number
        of stages.
        """
        rows = np.full(self._table.layers + 1, time)
        bounds = Bounds(low=rows, high=rows, after=rows - 1, stages_after=True)
        nodes = int(self._sizes[at])
        sweep = Sweep(self._table, self._fewest, bounds, nodes=nodes, least=nodes)
        totals = sweep.totals(np.array([nodes]))[:, 0]
        if totals.min() < self._best[at]:
            row = np.array([totals.argmin()])
            self._take(np.array([at]), trace(sweep, row, np.array([nodes])))


def fitting_sizes(table: StageTable, fewest: Integers) -> tuple[int, ...]:
    """Return the numbers of nodes that some cut fits, ascending; `fewest` is
    `table.fewest_stages`.
    """
    whole = fewest[0, :, table.per_node]
    return tuple(int(n) + 1 for n in np.flatnonzero(whole <= table.layers))


def template_of(table: StageTable, nodes: int, stages: Stages) -> PipelineTemplate:
    """Build the template of a cut; stages that are equally slow in the search stay so."""
    ticks = [table.stage_ticks(*stage) for stage in stages]
    times = [forward + backward for forward, backward in ticks]
    slowest = max(range(len(stages)), key=lambda s: (table.stage_time(*stages[s]), s))
    total = sum(times) + (3 * len(stages) + slowest - 1) * times[slowest] + sum(times[slowest:])
    made = []
    used = 0
    for (first, stop, gpus), (forward, backward) in zip(stages, ticks, strict=True):
        made.append(
            StageTemplate(
                first_layer=first,
                last_layer=stop - 1,
                node=used // table.per_node,
                gpus=gpus,
                forward_s=seconds(forward),
                backward_s=seconds(backward),
            )
        )
        used += gpus
    return PipelineTemplate(
        nodes=nodes,
        gpus_per_node=table.per_node,
        stages=tuple(made),
        iteration_s=seconds(total),
    )


# ---- Choice of the cuts of least T that become templates: those with the shortest replays.
#
# T1 + T2 + T3 ignores messages and which stages beside the slowest are short. So many cuts have
# the same T (in a model of equal blocks nearly always) but different step times. Owns that
# choice. Sampling draws from a fixed seed: the same profile gives the same templates.


def equal_cuts(
    table: StageTable, fewest: Integers, least: Mapping[int, tuple[float, Stages]]
) -> Mapping[int, tuple[Stages, ...]]:
    """Return for each number of nodes the cut found for it, first, and others of the same T and the
    same slowest stage. `least`: T with its cut, by number of nodes."""
    slowest = {n: max(table.stage_time(*stage) for stage in cut) for n, (_, cut) in least.items()}
    ties = {n: {cut: None} for n, (_, cut) in least.items()}
    sample = np.random.default_rng(0)
    sizes = np.array(sorted(least, key=lambda n: (slowest[n], n)), dtype=np.int64)
    while len(sizes):
        rows = np.array([slowest[n] for n in sizes.tolist()])
        count = swept_together(table, rows, sizes)
        for nodes, total, cut in _drawn(table, fewest, rows[:count], sizes[:count], sample):
            if total == least[nodes][0]:
                ties[nodes][cut] = None
        sizes = sizes[count:]
    return {nodes: tuple(cuts) for nodes, cuts in ties.items()}


def evened(table: StageTable, sums: Sequence[int], cut: Stages) -> Stages:
    """Return a cut of as many stages, none slower than the slowest one of `cut`, with the least
    maximum of gradient bytes per worker. T ignores gradient sums, so a cut of least T may leave one
    stage with many. `sums`: running sums of the layers' bytes."""
    slowest = max(table.stage_time(*stage) for stage in cut)

    def most_bytes(some: Stages) -> float:
        return max((sums[stop] - sums[first]) / gpus for first, stop, gpus in some)

    def below(limit: float) -> Stages | None:
        """Fill stages from the last one back, each up to the limit: late stages keep the fewest
        activations."""
        made, stop = [], table.layers

        def may_be(first: int, gpus: int) -> bool:
            few = (sums[stop] - sums[first]) / gpus < limit
            return few and table.stage_time(first, stop, gpus) <= slowest

        for before in reversed(range(len(cut))):
            gpus, first = cut[before][2], stop - 1
            if first < before or not may_be(first, gpus):
                return None
            while first > before and may_be(first - 1, gpus):
                first -= 1
            made.append((first, stop, gpus))
            stop = first
        return None if stop else tuple(reversed(made))

    while (better := below(most_bytes(cut))) is not None:
        cut = better
    return cut


def _drawn(
    table: StageTable,
    fewest: Integers,
    slowest: Floats,
    sizes: Integers,
    sample: np.random.Generator,
) -> Iterator[tuple[int, float, Stages]]:
    """Yield cuts of least T for each size and its slowest stage: number of nodes, T and cut."""
    times = np.unique(slowest)
    bounds = Bounds(low=times, high=times, after=times - 1)
    sweep = Sweep(table, fewest, bounds, nodes=int(sizes.max()), least=int(sizes.min()))
    queries = np.repeat(sizes, _SAMPLES)
    cuts = trace(sweep, np.repeat(np.searchsorted(times, slowest), _SAMPLES), queries, sample)
    for number, total in enumerate(cuts.totals().tolist()):
        yield int(queries[number]), total, cuts.stages(number)


def shortlists(candidates: Sequence[Sequence[Costed]]) -> list[Shortlist]:
    """Return the templates of each group, of one size and of equal T, that are worth a closer look.

    Which one suits a plan also depends on its shares of the batch and on the other pipelines. Those
    with too many links for NCCL come last.
    """
    kinds = [
        [Kind(_MICROBATCHES * len(each.template.stages), each.cut) for each in group]
        if len(group) > 1
        else []
        for group in candidates
    ]
    times = computed_s(("1f1b", kind) for group in kinds for kind in group)
    chosen = []
    for group, own in zip(candidates, kinds, strict=True):
        done = [max(times["1f1b", kind]) for kind in own] or [0.0]
        many = [
            most_links([stage.gpus for stage in each.template.stages]) > _MOST_LINKS
            for each in group
        ]
        order = [at for *_, at in sorted(zip(many, done, range(len(group)), strict=True))]
        few = list(dict.fromkeys((order[0], 0, *order[1:])))[:_SHORTLISTED]
        chosen.append(
            Shortlist(
                quickest=group[order[0]],
                first_found=group[0],
                others=tuple(group[at] for at in few if at not in (order[0], 0)),
            )
        )
    return chosen

"""Demand for pipelines to be instantiated, and the cost of any sizes by the formula (Oobleck §4.2).

Owns the question, the shares of the batch that minimise the slowest pipeline's time, and which
answers a judge should consider. Must not search: the best answers come from
`oobleck.planner.search.sizesearch`.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heapify, heapreplace
from itertools import islice

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.core.plan import Pipeline, PipelineTemplate, place
from oobleck.core.profile import Links, Profile
from oobleck.planner.cost.kinds import Cut, template_cut
from oobleck.planner.cost.stages import PipelineCost, pipeline_cost, sync_ticks

Costs = Mapping[int, PipelineCost]
#: Nodes per pipeline, biggest first.
Sizes = tuple[int, ...]

#: Answers within this share of the best are worth a judge's look: the formula and a replay of the
#: programs differ by about as much.
BAND = Fraction(5, 100)
#: The same for pipelines that fill and drain for most of the step.
ROUGH_BAND = Fraction(1, 3)
#: Most answers of which a judge may consider all.
MOST_SIZES = 64
#: Beyond this many pipelines answers are not enumerated: there are too many, or so few that a
#: search finds them.
_MOST_PIPELINES = 16


class Costed:
    """Template with its costs, each computed once when first needed."""

    def __init__(self, template: PipelineTemplate, profile: Profile) -> None:
        self.template, self._profile = template, profile
        self._pipelines: dict[int, Pipeline] = {}

    def pipeline(self, microbatches: int) -> Pipeline:
        """Return a pipeline of so many micro-batches, on any nodes."""
        if microbatches not in self._pipelines:
            nodes = tuple(NodeName(f"n{number}") for number in range(self.template.nodes))
            self._pipelines[microbatches] = place(self.template, nodes, microbatches=microbatches)
        return self._pipelines[microbatches]

    @cached_property
    def cost(self) -> PipelineCost:
        return pipeline_cost(self.template, self._profile)

    @cached_property
    def cut(self) -> Cut:
        return template_cut(self.template, self._profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demand for pipelines of these templates on exactly so many nodes, for a batch."""

    costs: Costs
    nodes: int
    microbatches: int
    min_pipelines: int
    links: Links

    @property
    def numbers(self) -> range:
        """Possible numbers of pipelines."""
        most = min(self.nodes // min(self.costs), self.microbatches)
        return range(max(1, self.min_pipelines), most + 1)

    def shares(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the micro-batches per pipeline. Raises PlanInfeasible where there are too few."""
        return share_batch([self.costs[size] for size in sizes], self.microbatches)

    def step(self, sizes: Sequence[int]) -> int:
        """Return the ticks of a step with the best shares."""
        gradient_bytes = max(self.costs[size].gradient_bytes for size in sizes)
        sync = sync_ticks(gradient_bytes, pipelines=len(sizes), links=self.links)
        kinds = {self.costs[size]: 0 for size in sizes}
        for size, number in Counter(sizes).items():
            kinds[self.costs[size]] += number
        return makespan(kinds, self.microbatches) + sync

    def rough(self, sizes: Sequence[int]) -> bool:
        """Return whether some pipeline spends most of the step filling and draining. The formula is
        then up to a quarter too long."""
        kinds = set(zip(sizes, self.shares(sizes), strict=True))
        return any(
            share * self.costs[size].period < 2 * self.costs[size].first for size, share in kinds
        )

    def all_sizes(self) -> list[Sizes] | None:
        """List all sizes that answer the demand; None where they are too many."""
        numbers = self.numbers
        if not numbers or numbers[-1] > _MOST_PIPELINES:
            return None
        every = _sums(sorted(self.costs), self.nodes, max(self.costs), numbers.start, numbers[-1])
        first = list(islice(every, MOST_SIZES + 1))
        return first if len(first) <= MOST_SIZES else None

    def neighbours(self, sizes: Sizes) -> Iterator[Sizes]:
        """Yield the sizes that `sizes` become when one node moves from one pipeline to another."""
        kinds = sorted(set(sizes))
        for giver in kinds:
            for taker in kinds:
                if giver == taker + 1:
                    continue  # they would only swap
                rest = list(sizes)
                rest.remove(giver)
                if taker in rest and giver - 1 in self.costs and taker + 1 in self.costs:
                    rest.remove(taker)
                    yield tuple(sorted((*rest, giver - 1, taker + 1), reverse=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """Nodes and micro-batches of each pipeline, and their step time."""

    #: Nodes per pipeline, biggest first.
    sizes: tuple[int, ...]
    #: Micro-batches per pipeline.
    shares: tuple[int, ...]
    #: Ticks of a step by the formula.
    step: int


#: Returns the step time of each instantiation, in any unit.
Judge = Callable[[Sequence[Instantiation]], Sequence[float]]


def by_formula(candidates: Sequence[Instantiation]) -> Sequence[float]:
    """Judge candidates by the formula's step time."""
    return [candidate.step for candidate in candidates]


def worth_judging(
    demand: Demand, best_by_formula: Mapping[Sizes, int], *, most: int
) -> dict[Sizes, int]:
    """Return sizes that may be the fastest, with their ticks, the best by the formula first.

    `best_by_formula` has ticks by sizes; up to `most` of them are returned. Where the formula is
    rough, their neighbours are added. Where few sizes are possible, so are all within `ROUGH_BAND`:
    the formula knows neither split backwards nor sums beside compute.
    """
    best = min(best_by_formula, key=lambda sizes: best_by_formula[sizes])
    more: Iterable[Sizes] | None = demand.all_sizes()
    few = more is not None
    if more is None and demand.rough(best):
        more = (near for sizes in best_by_formula for near in demand.neighbours(sizes))
    if more is not None:
        most = max(most, MOST_SIZES)
    steps = dict(best_by_formula)
    for sizes in more or ():
        if sizes not in steps:
            steps[sizes] = demand.step(sizes)
    close = [
        sizes
        for sizes, step in steps.items()
        if step <= steps[best] * (1 + BAND)
        or (step <= steps[best] * (1 + ROUGH_BAND) and (few or demand.rough(sizes)))
    ]
    close.sort(key=lambda sizes: steps[sizes])
    return {sizes: steps[sizes] for sizes in close[:most]}


def _sums(
    rising: Sequence[int], nodes: int, biggest: int, fewest: int, most: int
) -> Iterator[Sizes]:
    """Yield sizes up to `biggest`, biggest first, `fewest` to `most` of them, with `nodes` in
    total.
    """
    if nodes == 0:
        if fewest <= 0:
            yield ()
        return
    if not max(fewest, -(-nodes // biggest)) <= min(most, nodes // rising[0]):
        return
    # A smaller first size leaves too many nodes for the others.
    low = bisect_left(rising, -(-nodes // most))
    for size in rising[low : bisect_right(rising, min(nodes, biggest))]:
        for rest in _sums(rising, nodes - size, size, fewest - 1, most - 1):
            yield (size, *rest)


def share_batch(costs: Sequence[PipelineCost], microbatches: int) -> tuple[int, ...]:
    """Return micro-batches per pipeline, at least one each, that minimise the slowest pipeline's
    time.

    The result equals handing out one micro-batch after the other, each to the pipeline that would
    finish it first (the first one among ties). Raises PlanInfeasible where there are fewer
    micro-batches than pipelines.
    """
    if len(costs) > microbatches:
        raise PlanInfeasible(
            f"{len(costs)} pipelines need as many micro-batches, and the batch has {microbatches}; "
            "enlarge global_batch or lower microbatch"
        )
    time = _full_at(tuple(Counter(costs).items()), microbatches)
    sure = {cost: _share(cost, time - 1, microbatches) for cost in set(costs)}
    most = {cost: _share(cost, time, microbatches) for cost in sure}
    left = microbatches - sum(sure[cost] for cost in costs)
    shares = []
    for cost in costs:
        more = min(left, most[cost] - sure[cost])
        shares.append(sure[cost] + more)
        left -= more
    return tuple(shares)


def makespan(pipelines: Mapping[PipelineCost, int], microbatches: int) -> int:
    """Return the ticks of the slowest of so many pipelines of each cost, with the best shares."""
    # Each has at least one micro-batch, however long that takes.
    full = _full_at(tuple(pipelines.items()), microbatches)
    return max(full, *(cost.first for cost in pipelines))


def _share(cost: PipelineCost, time: int, microbatches: int) -> int:
    return max(1, cost.capacity(time, microbatches))


#: Leaps stop when at most so many micro-batches per pipeline are left.
_LEFT = 3
#: Covers rounding in floating point.
_ROUNDED_DOWN = 1 - 1e-9


@lru_cache(maxsize=4096)
def _full_at(pipelines: tuple[tuple[PipelineCost, int], ...], microbatches: int) -> int:
    """Return the first tick by which so many pipelines of each cost, each with at least one
    micro-batch, finish the batch.

    In any time a pipeline finishes at most one micro-batch more than its rate says. So leaps by the
    rates never go too far. The last few micro-batches are counted one after the other.
    """

    def missing(time: int) -> int:
        return microbatches - sum(n * _share(cost, time, microbatches) for cost, n in pipelines)

    time, left = 0, missing(0)
    if left <= 0:
        return 0
    number = sum(n for _, n in pipelines)
    latest = max(cost.time(microbatches) for cost, _ in pipelines)
    for until in sorted({latest, *(cost.first for cost, _ in pipelines)}):
        # Until then no further cost ends micro-batches.
        rates = [n / cost.period for cost, n in pipelines if cost.first <= time + 1 and cost.period]
        while left > _LEFT * number and time + 1 < until:
            leap = int((left - number) / sum(rates) * _ROUNDED_DOWN) if rates else until
            time = min(time + max(1, leap), until - 1)
            left = missing(time)
    ends = [(cost.next_end(time), order) for order, (cost, _) in enumerate(pipelines)]
    heapify(ends)
    while True:
        time, order = ends[0]
        cost, n = pipelines[order]
        left -= n if cost.period else microbatches
        if left <= 0:
            return time
        heapreplace(ends, (time + cost.period, order))

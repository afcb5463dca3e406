"""Demand for pipelines to be instantiated, and the cost of any sizes by the formula (Oobleck §4.2).

Owns the question, and which answers a judge should consider. Must not search: the best answers come
from `oobleck.planner.search.sizesearch`.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from oobleck.core.profile import Links
from oobleck.planner.cost.stages import PipelineCost, sync_ticks
from oobleck.planner.search.shares import makespan, share_batch

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
#: With more pipelines there are far more answers, or so few that a search finds them.
_MOST_PIPELINES = 16


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
        """Return whether some pipeline fills and drains for most of the step. There the formula is
        up to a quarter too long."""
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


def worth_judging(demand: Demand, found: Mapping[Sizes, int], *, most: int) -> dict[Sizes, int]:
    """Return sizes that may be the fastest, with their ticks, the best by the formula first.

    Up to `most` are of `found` (with their ticks; the best by the formula among them). Where the
    formula is rough, their neighbours are added, and where there are few sizes at all, any of them.
    """
    best = min(found, key=lambda sizes: found[sizes])
    more: Iterable[Sizes] | None = demand.all_sizes()
    if more is None and demand.rough(best):
        more = (near for sizes in found for near in demand.neighbours(sizes))
    if more is not None:
        most = max(most, MOST_SIZES)
    steps = dict(found)
    for sizes in more or ():
        if sizes not in steps:
            steps[sizes] = demand.step(sizes)
    close = [
        sizes
        for sizes, step in steps.items()
        if step <= steps[best] * (1 + BAND)
        or (step <= steps[best] * (1 + ROUGH_BAND) and demand.rough(sizes))
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
    low = bisect_left(rising, -(-nodes // most))  # less leaves too much for the others
    for size in rising[low : bisect_right(rising, min(nodes, biggest))]:
        for rest in _sums(rising, nodes - size, size, fewest - 1, most - 1):
            yield (size, *rest)

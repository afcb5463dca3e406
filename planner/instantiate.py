"""Pipeline instantiation: how many pipelines of which template, and their shares of the batch.

Minimises the estimated step time of Oobleck §4.2: the slowest pipeline's share plus gradient sync.
For a number of pipelines p and a time bound, each size does so many micro-batches, so whether p
pipelines can do the batch is a knapsack of p items (`oobleck.planner.knapsack`), and the least
time follows by bisection. Numbers of pipelines whose knapsack fails at the best time known so far
are done with at once. Gradient sync hangs on p and on the template that has the most gradients per
GPU, so templates are left out by that, as long as sync may gain more than compute loses.

The result is exact wherever the knapsack is; elsewhere `Instantiation.bound` says how far from
the best it can be at most. Owns no formula: they are in `oobleck.planner.cost`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.cost import PipelineCost, pipeline_cost, sync_ticks
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.knapsack import Kind, Selection, select
from oobleck.planner.plan import Pipeline, Plan, place
from oobleck.planner.profile import Links, Profile
from oobleck.planner.shares import makespan, share_batch
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.units import are, count

Costs = Mapping[int, PipelineCost]
Floats = NDArray[np.float64]

#: Instantiations this much slower than the best are worth a closer look by a judge: the formula
#: and a replay of the programs differ by about as much.
BAND = Fraction(5, 100)
#: How many of them, the best one included.
MOST_CANDIDATES = 6
#: Those others need not be the very best of their number of pipelines.
ROUGH = Fraction(5, 1000)
EXACT = Fraction(0)
#: After so many sizes in knapsacks what is not this much better is not looked for any more: with
#: next to no gradient sync, hundreds of numbers of pipelines differ by less.
_PATIENCE = 4000
CLOSE = Fraction(1, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """So many nodes and micro-batches for each pipeline, and what a step of them takes."""

    #: Nodes per pipeline, biggest first.
    sizes: tuple[int, ...]
    #: Micro-batches per pipeline.
    shares: tuple[int, ...]
    #: Ticks of a step by the formula.
    step: int
    #: Ticks that no instantiation of the same nodes can do better than.
    bound: int

    @property
    def exact(self) -> bool:
        """No instantiation is better by the formula."""
        return self.step == self.bound


#: The step time of each instantiation, in any unit.
Judge = Callable[[Sequence[Instantiation]], Sequence[float]]


def by_formula(candidates: Sequence[Instantiation]) -> Sequence[float]:
    """The judge that believes the formula."""
    return [candidate.step for candidate in candidates]


def instantiate(
    templates: Mapping[int, PipelineTemplate],
    nodes: Sequence[NodeName],
    *,
    profile: Profile,
    microbatches: int,
    min_pipelines: int,
    generation: Generation,
    judge: Judge = by_formula,
    costs: Costs | None = None,
) -> Plan:
    """The plan with the smallest step time that uses all `nodes`, by `judge` among the best.

    Bigger pipelines come first; nodes are taken by name. Where no combination of templates uses
    all of them (more nodes than layers and micro-batches have use for), the last ones are left
    out. `costs` are those of the templates, where they are at hand. Raises PlanInfeasible.
    """
    names = sorted(nodes)
    costs = template_costs(templates, profile) if costs is None else costs
    used = most_used(costs, len(names), least=min_pipelines, most=microbatches)
    candidates = choose(
        costs,
        used or len(names),
        links=profile.links,
        microbatches=microbatches,
        min_pipelines=min_pipelines,
    )
    chosen = best_judged(candidates, judge)
    pipelines: list[Pipeline] = []
    first_node = first_microbatch = 0
    for size, share in zip(chosen.sizes, chosen.shares, strict=True):
        pipelines.append(
            place(
                templates[size],
                tuple(names[first_node : first_node + size]),
                first_microbatch=first_microbatch,
                microbatches=share,
            )
        )
        first_node += size
        first_microbatch += share
    return Plan(generation=generation, pipelines=tuple(pipelines))


def best_judged(candidates: Sequence[Instantiation], judge: Judge) -> Instantiation:
    """The fastest; of equals the one with more pipelines, which survive more losses."""
    times = judge(candidates)
    order = sorted(range(len(candidates)), key=lambda i: (times[i], -len(candidates[i].sizes)))
    return candidates[order[0]]


def template_costs(templates: Mapping[int, PipelineTemplate], profile: Profile) -> Costs:
    return {size: pipeline_cost(template, profile) for size, template in sorted(templates.items())}


def most_used(sizes: Sequence[int] | Costs, nodes: int, *, least: int, most: int) -> int:
    """The most nodes, up to `nodes`, that `least` to `most` pipelines of these sizes use exactly;
    0 where there are no such pipelines."""
    if not sizes:
        return 0
    everything = (1 << nodes + 1) - 1
    reached, best = 1, 0  # bit n: the pipelines so far can use n nodes
    for pipelines in range(1, min(most, nodes // min(sizes)) + 1):
        now = 0
        for size in sizes:
            now |= reached << size
        reached = now & everything
        if pipelines >= least:
            best = max(best, reached.bit_length() - 1)
        if best == nodes or not reached:
            break
    return max(best, 0)


def choose(
    costs: Costs,
    nodes: int,
    *,
    links: Links,
    microbatches: int,
    min_pipelines: int,
    most: int = MOST_CANDIDATES,
    limit: int | None = None,
    slack: Fraction = EXACT,
    effort: int | None = None,
) -> tuple[Instantiation, ...]:
    """The best instantiation on exactly `nodes` nodes, then up to `most` - 1 others in the band.

    Those are the best ones of other numbers of pipelines, the most promising numbers first. Of
    equal step times that with more pipelines counts as the best. With a `limit` (ticks) there is
    none where no step takes so little. The best may be off by the part `slack` of its step time.
    With an `effort` (sizes in knapsacks, a microsecond or two each) the search ends early, and the
    bounds say what it has left open. Raises PlanInfeasible.
    """
    if not costs:
        raise PlanInfeasible("there are no templates to choose from")
    fewest, biggest = max(1, min_pipelines), min(nodes // min(costs), microbatches)
    if biggest < fewest:
        raise PlanInfeasible(*_too_few(min(costs), nodes, microbatches, fewest))
    search = _Search(costs, nodes, microbatches, links, slack)
    floors = {pipelines: search.floors(pipelines) for pipelines in range(fewest, biggest + 1)}
    numbers = sorted(floors, key=lambda pipelines: min(floors[pipelines]))
    best: _Found | None = None
    for pipelines in numbers:
        # One that is only as fast must have more pipelines.
        even = best is not None and pipelines < len(best.sizes)
        if best is not None:
            limit = best.step - max(even, int(best.step * search.slack))
        if effort is not None and search.looked_at > effort and limit is not None:
            search.leave_open(min(floors[pipelines]))
            break
        best = search.best(pipelines, floors[pipelines], limit) or best
    if best is None and limit is not None:
        return ()
    if best is None:
        raise PlanInfeasible(
            f"no {fewest} to {biggest} pipelines of {', '.join(map(str, sorted(costs)))} nodes use "
            f"exactly {count(nodes, 'node')}"
        )
    bound = min(best.step, search.open_from)
    found, within = [best], best.step + int(best.step * BAND)
    search.be_quick()
    for pipelines in numbers[: 3 * most]:
        if len(found) < most and pipelines != len(best.sizes):
            other = search.best(pipelines, floors[pipelines], within)
            found.extend([other] if other else [])
    return tuple(
        Instantiation(
            sizes=one.sizes,
            shares=share_batch([costs[size] for size in one.sizes], microbatches),
            step=one.step,
            bound=bound,
        )
        for one in found
    )


def step_of(costs: Costs, sizes: Sequence[int], microbatches: int, links: Links) -> int:
    """Ticks of a step of pipelines of these sizes, with the best shares, by the formula."""
    gradient_bytes = max(costs[size].gradient_bytes for size in sizes)
    sync = sync_ticks(gradient_bytes, pipelines=len(sizes), links=links)
    return makespan(Counter(costs[size] for size in sizes), microbatches) + sync


def _too_few(smallest: int, nodes: int, microbatches: int, pipelines: int) -> Iterator[str]:
    if nodes < smallest * pipelines:
        yield (
            f"needs {count(smallest * pipelines, 'node')}: {count(pipelines, 'pipeline')} "
            f"of at least {count(smallest, 'node')}; {are(nodes)} live"
        )
    if microbatches < pipelines:
        yield (
            f"{pipelines} pipelines need as many micro-batches, and the batch has "
            f"{microbatches}; enlarge global_batch or lower microbatch"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    sizes: tuple[int, ...]
    #: Ticks.
    step: int


class _Search:
    """The best sizes for one number of pipelines after the other."""

    def __init__(
        self, costs: Costs, nodes: int, microbatches: int, links: Links, slack: Fraction
    ) -> None:
        self._costs = costs
        self._nodes = nodes
        self._microbatches = microbatches
        self._links = links
        #: Step times from here on were not ruled out; all below were, except the ones found.
        self.open_from = _NEVER
        self._slack = slack
        #: Sizes in all knapsacks so far: a measure of the time spent.
        self.looked_at = 0
        #: Templates by gradients per GPU: what syncs faster stands before what syncs slower.
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
        """Only rough answers are wanted from now on."""
        self._slack = ROUGH

    def floors(self, pipelines: int) -> Floats:
        """For each place in the order of gradients: no step of templates up to there, with that
        one's sync, takes less ticks.

        Parts of pipelines may do parts of micro-batches here. That is a linear program in the
        numbers of pipelines with two constraints, which two sizes beside nodes/pipelines solve.
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

    def best(self, pipelines: int, floors: Floats, limit: int | None) -> _Found | None:
        """The fastest sizes of exactly that many pipelines, if a step takes `limit` ticks at most.

        The template with the slowest sync is fixed in turn, the one with the lowest floor first.
        """
        best: _Found | None = None
        for index in map(int, np.argsort(floors, kind="stable")):
            if not np.isfinite(floors[index]):
                break
            if limit is None:
                limit = self._reachable(pipelines, index, int(floors[index]))
            if limit is None:
                continue
            if floors[index] > limit:
                self.leave_open(floors[index])
                break
            slowest = self._sync(self._order[index], pipelines)
            found = self._least_time(self._up_to(index), pipelines, limit - slowest, slowest)
            if found is not None:
                time, sizes = found
                step = time + max(self._sync(size, pipelines) for size in set(sizes))
                best = _Found(sizes=sizes, step=step)
                limit = step - max(1, int(step * self.slack))
        return best

    @property
    def slack(self) -> Fraction:
        """The part of a step time that is not worth more search."""
        return self._slack or (CLOSE if self.looked_at > _PATIENCE else EXACT)

    def leave_open(self, step: float) -> None:
        """Steps of `step` ticks and more were not ruled out."""
        if step < _NEVER:
            self.open_from = min(self.open_from, math.ceil(step))

    def _reachable(self, pipelines: int, index: int, floor: int) -> int | None:
        """Some step time that is not too short for the templates up to `index`."""
        allowed = self._up_to(index)
        latest = max(cost.time(self._microbatches) for cost in allowed.values())
        time = max(1, floor + max(cost.period for cost in allowed.values()))
        while self._select(allowed, pipelines, time).sizes is None:
            if time >= latest:
                return None
            time *= 2
        return time + self._sync(self._order[index], pipelines)

    def _up_to(self, index: int) -> Costs:
        """Costs by size, rising, of the templates up to a place in the order of gradients."""
        return {size: self._costs[size] for size in sorted(self._order[: index + 1])}

    def _sync(self, size: int, pipelines: int) -> int:
        count = self._costs[size].gradient_bytes
        return sync_ticks(count, pipelines=pipelines, links=self._links)

    def _least_time(
        self, allowed: Costs, pipelines: int, limit: int, sync: int
    ) -> tuple[int, tuple[int, ...]] | None:
        """The least time, up to `limit`, within which the pipelines can do the batch, and their
        sizes.

        Each answer of the knapsack moves a bound to where the capacities change: a yes to the
        time that the sizes really take, a no to the next micro-batch that any template is done
        with. From a yes the steps down double, since the limit is mostly near.
        """
        low = proven = -1
        high, best = limit + 1, None
        time, step = limit, max(1, min(cost.period for cost in allowed.values()))
        while low + 1 < high - high * self.slack:
            selection = self._select(allowed, pipelines, time)
            if selection.sizes is not None:
                chosen = Counter(allowed[size] for size in selection.sizes)
                high = makespan(chosen, self._microbatches)
                best = high, selection.sizes
            else:
                low = _next_change(allowed, time) - 1
                proven = low if selection.proven else proven
            time = max(high - step, low + 1) if low < 0 else (low + high) // 2
            step *= 2
        if proven < low:
            proven = self._ruled_out(allowed, pipelines, proven, min(low, limit))
        self.leave_open(proven + 1 + sync)
        return best

    def _ruled_out(self, allowed: Costs, pipelines: int, proven: int, high: int) -> int:
        """The last time before `high` that is proven too short."""
        while high - proven > 1:
            time = (proven + high) // 2
            selection = self._select(allowed, pipelines, time)
            if selection.sizes is None and selection.proven:
                proven = _next_change(allowed, time) - 1
            else:
                high = time
        return proven

    def _select(self, allowed: Costs, pipelines: int, time: int) -> Selection:
        kinds = [
            Kind(size, capacity)
            for size, cost in allowed.items()
            if (capacity := cost.capacity(time, self._microbatches))
        ]
        self.looked_at += len(kinds)
        return select(kinds, items=pipelines, size=self._nodes, worth=self._microbatches)


_NEVER = 1 << 200
#: More than what floating point may have rounded up.
_ROUNDED_DOWN = 1 - 1e-9


def _next_change(allowed: Costs, time: int) -> int:
    """The first tick after `time` at which some template is done with one more micro-batch."""
    return min(_next_done(cost, time) for cost in allowed.values())


def _next_done(cost: PipelineCost, time: int) -> int:
    if time < cost.first:
        return cost.first
    if cost.period == 0:
        return _NEVER
    return cost.first + ((time - cost.first) // cost.period + 1) * cost.period

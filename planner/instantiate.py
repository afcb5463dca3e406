"""Pipeline instantiation: how many pipelines of which template, and their shares of the batch.

Minimises the estimated step time of Oobleck §4.2: the slowest pipeline's share plus gradient sync.
Numbers of pipelines are visited in the order of their lower bounds, each searched for its best
sizes (`oobleck.planner.sizesearch`), until no bound is below the best step found. Owns that order,
the few candidates near the best, and the plan that the judge picks of them. Owns no formula: they
are in `oobleck.planner.cost`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from oobleck.planner.cost import pipeline_cost, sync_ticks
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.plan import Pipeline, Plan, place
from oobleck.planner.profile import Links, Profile
from oobleck.planner.shares import makespan, share_batch
from oobleck.planner.sizesearch import EXACT, Costs, Found, SizeSearch
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.units import are, count

#: Instantiations this much slower than the best are worth a closer look by a judge: the formula
#: and a replay of the programs differ by about as much.
BAND = Fraction(5, 100)
#: How many of them, the best one included.
MOST_CANDIDATES = 6


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
    search = SizeSearch(costs, nodes, microbatches, links, slack)
    floors = {pipelines: search.floors(pipelines) for pipelines in range(fewest, biggest + 1)}
    numbers = sorted(floors, key=lambda pipelines: min(floors[pipelines]))
    best: Found | None = None
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

"""Pipeline instantiation: how many pipelines of which template, and their shares of the batch.

Minimises the estimated step time of Oobleck §4.2: the slowest pipeline's share plus gradient sync.
Numbers of pipelines are visited in the order of their lower bounds, until no bound is below the
best step found. Each is searched for its best sizes (`oobleck.planner.search.sizesearch`). Owns
that order, and the choice by a judge among candidates near the best. The formulas are in
`oobleck.planner.cost.stages`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, place
from oobleck.core.profile import Links, Profile
from oobleck.core.units import are, count
from oobleck.planner.cost.stages import PipelineCost, pipeline_cost
from oobleck.planner.search.demand import (
    BAND,
    Costs,
    Demand,
    Instantiation,
    Judge,
    Sizes,
    by_formula,
    worth_judging,
)
from oobleck.planner.search.sizesearch import EXACT, BestSizes, Floats, SizeSearch

#: Candidates near the best that the search looks for, the best one included.
MOST_CANDIDATES = 6


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
    """Return the plan with the smallest step time that uses all `nodes`, by `judge` among the best.

    Bigger pipelines come first; nodes are taken by name. If no combination of templates uses all
    nodes (more than layers and micro-batches can use), the last ones are left out. `costs` are
    those of the templates, where the caller has them. Raises PlanInfeasible.
    """
    names = sorted(nodes)
    costs = template_costs(templates, profile) if costs is None else costs
    used = most_used(costs, len(names), least=min_pipelines, most=microbatches)
    demand = Demand(
        costs=costs,
        nodes=used or len(names),
        microbatches=microbatches,
        min_pipelines=min_pipelines,
        links=profile.links,
    )
    candidates = judgeable(demand)
    chosen = best_judged(candidates, judge)
    return Plan.of_pipelines(_placed(chosen, templates, names), generation=generation)


def _placed(
    chosen: Instantiation, templates: Mapping[int, PipelineTemplate], names: Sequence[NodeName]
) -> tuple[Pipeline, ...]:
    """Place the chosen pipelines on the nodes in order."""
    pipelines: list[Pipeline] = []
    first_node = 0
    for size, share in zip(chosen.sizes, chosen.shares, strict=True):
        nodes = tuple(names[first_node : first_node + size])
        pipelines.append(place(templates[size], nodes, microbatches=share))
        first_node += size
    return tuple(pipelines)


def best_judged(candidates: Sequence[Instantiation], judge: Judge) -> Instantiation:
    """Return the fastest; ties go to more pipelines, which survive more losses."""
    times = judge(candidates)
    order = sorted(range(len(candidates)), key=lambda i: (times[i], -len(candidates[i].sizes)))
    return candidates[order[0]]


def template_costs(templates: Mapping[int, PipelineTemplate], profile: Profile) -> Costs:
    return {size: pipeline_cost(template, profile) for size, template in sorted(templates.items())}


def most_used(sizes: Sequence[int] | Costs, nodes: int, *, least: int, most: int) -> int:
    """Return the most nodes, up to `nodes`, that `least` to `most` pipelines of these sizes use
    exactly; 0 where there are no such pipelines."""
    if not sizes:
        return 0
    everything = (1 << nodes + 1) - 1
    reached, best = 1, 0  # bit n: pipelines so far can use n nodes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits of a search."""

    #: Candidates, the best one included.
    most: int = MOST_CANDIDATES
    #: Most ticks of a step; slower candidates are not returned.
    limit: int | None = None
    #: Share of its step time by which the best may be off.
    slack: Fraction = EXACT
    #: Most sizes to put into knapsacks, a microsecond or two each. After that the search ends, if
    #: it has a candidate or a limit.
    effort: int | None = None


def judgeable(demand: Demand) -> tuple[Instantiation, ...]:
    """Return the instantiations that a judge should consider, the best by the formula first. Raises
    PlanInfeasible."""
    best = choose(demand)
    close = worth_judging(demand, {one.sizes: one.step for one in best}, most=MOST_CANDIDATES)
    return tuple(_instantiation(demand, sizes, step) for sizes, step in close.items())


def choose(demand: Demand, patience: Patience | None = None) -> tuple[Instantiation, ...]:
    """Return the best instantiation by the formula, then a few others in the band.

    The others are the best ones of other numbers of pipelines, the most promising numbers first.
    Ties go to more pipelines. Raises PlanInfeasible.
    """
    if not demand.costs:
        raise PlanInfeasible("there are no templates to choose from")
    if not demand.numbers:
        raise PlanInfeasible(*_too_few(demand))
    return _chosen(
        tuple(demand.costs.items()),
        demand.nodes,
        demand.microbatches,
        demand.min_pipelines,
        demand.links,
        patience or Patience(),
    )


@lru_cache(maxsize=256)
def _chosen(
    costs: tuple[tuple[int, PipelineCost], ...],
    nodes: int,
    microbatches: int,
    min_pipelines: int,
    links: Links,
    patience: Patience,
) -> tuple[Instantiation, ...]:
    """Choose for the demand of these fields. Cached by them: the loss of any one of alike nodes has
    the same demand."""
    demand, floors = _demanded(costs, nodes, microbatches, min_pipelines, links)
    search = SizeSearch(demand, patience.slack)
    numbers = list(floors)
    best = _best(search, floors, patience)
    if best is None and patience.limit is not None:
        return ()
    if best is None:
        sizes = ", ".join(map(str, sorted(demand.costs)))
        raise PlanInfeasible(
            f"no {demand.numbers.start} to {demand.numbers[-1]} pipelines of {sizes} nodes use "
            f"exactly {count(demand.nodes, 'node')}"
        )
    chosen, within = [best], best.step + int(best.step * BAND)
    search.be_quick()
    for pipelines in numbers[: 3 * patience.most]:
        if len(chosen) < patience.most and pipelines != len(best.sizes):
            other = search.best(pipelines, floors[pipelines], within)
            chosen.extend([other] if other else [])
    return tuple(_instantiation(demand, one.sizes, one.step) for one in chosen)


@lru_cache(maxsize=32)
def _demanded(
    costs: tuple[tuple[int, PipelineCost], ...],
    nodes: int,
    microbatches: int,
    min_pipelines: int,
    links: Links,
) -> tuple[Demand, Mapping[int, Floats]]:
    """Return the demand of these fields, and lower bounds by number of pipelines, least first.
    Cached apart from `_chosen`, since they do not depend on the limit."""
    demand = Demand(
        costs=dict(costs),
        nodes=nodes,
        microbatches=microbatches,
        min_pipelines=min_pipelines,
        links=links,
    )
    search = SizeSearch(demand, EXACT)
    floors = {pipelines: search.floors(pipelines) for pipelines in demand.numbers}
    return demand, dict(sorted(floors.items(), key=lambda one: min(one[1])))


def _best(search: SizeSearch, floors: Mapping[int, Floats], patience: Patience) -> BestSizes | None:
    """Return the best of all numbers of pipelines, visited in the order of `floors`."""
    limit, best = patience.limit, None
    for pipelines, floor in floors.items():
        if best is not None:
            # On a tie, more pipelines win.
            even = pipelines < len(best.sizes)
            limit = best.step - max(even, int(best.step * search.slack))
        spent = patience.effort is not None and search.looked_at > patience.effort
        if spent and limit is not None:
            break
        best = search.best(pipelines, floor, limit) or best
    return best


def _instantiation(demand: Demand, sizes: Sizes, step: int) -> Instantiation:
    return Instantiation(sizes=sizes, shares=demand.shares(sizes), step=step)


def _too_few(demand: Demand) -> Iterator[str]:
    smallest, nodes, microbatches = min(demand.costs), demand.nodes, demand.microbatches
    pipelines = max(1, demand.min_pipelines)
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

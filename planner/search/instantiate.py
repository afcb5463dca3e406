"""Pipeline instantiation: how many pipelines of which template, and their shares of the batch.

Minimises the estimated step time of Oobleck §4.2: the slowest pipeline's share plus gradient sync.
Numbers of pipelines are visited in the order of their lower bounds, each searched for its best
sizes (`oobleck.planner.search.sizesearch`), until no bound is below the best step found. Owns that
order, and the plan that the judge picks of the candidates near the best. Owns no formula: they are
in `oobleck.planner.cost.formula`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, place
from oobleck.core.profile import Profile
from oobleck.core.units import are, count
from oobleck.planner.cost.formula import pipeline_cost
from oobleck.planner.search.demand import BAND, Costs, Demand, Sizes, worth_judging
from oobleck.planner.search.sizesearch import EXACT, BestSizes, Floats, SizeSearch

#: How many candidates near the best the search looks for, the best one included.
MOST_CANDIDATES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Instantiation:
    """Sizes and shares of pipelines: nodes and micro-batches of each, and what a step of them
    takes."""

    #: Nodes per pipeline, biggest first.
    sizes: tuple[int, ...]
    #: Micro-batches per pipeline.
    shares: tuple[int, ...]
    #: Ticks of a step by the formula.
    step: int


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
    """Nodes are handed out in order."""
    pipelines: list[Pipeline] = []
    first_node = 0
    for size, share in zip(chosen.sizes, chosen.shares, strict=True):
        nodes = tuple(names[first_node : first_node + size])
        pipelines.append(place(templates[size], nodes, microbatches=share))
        first_node += size
    return tuple(pipelines)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits on how far a search goes."""

    #: Candidates, the best one included.
    most: int = MOST_CANDIDATES
    #: Ticks: there is no candidate where no step takes so little.
    limit: int | None = None
    #: The best may be off by this part of its step time.
    slack: Fraction = EXACT
    #: Sizes in knapsacks, a microsecond or two each, after which the search ends early, if it has
    #: a candidate or a limit.
    effort: int | None = None


def judgeable(demand: Demand) -> tuple[Instantiation, ...]:
    """Return the instantiations that a judge should look at, the best by the formula first. Raises
    PlanInfeasible."""
    found = choose(demand)
    close = worth_judging(demand, {one.sizes: one.step for one in found}, most=MOST_CANDIDATES)
    return tuple(_instantiation(demand, sizes, step) for sizes, step in close.items())


def choose(demand: Demand, patience: Patience | None = None) -> tuple[Instantiation, ...]:
    """The best instantiation by the formula, then a few others in the band.

    The others are the best ones of other numbers of pipelines, the most promising numbers first.
    With equal step times, more pipelines count as better. Raises PlanInfeasible.
    """
    patience = patience or Patience()
    if not demand.costs:
        raise PlanInfeasible("there are no templates to choose from")
    if not demand.numbers:
        raise PlanInfeasible(*_too_few(demand))
    search = SizeSearch(demand, patience.slack)
    floors = {pipelines: search.floors(pipelines) for pipelines in demand.numbers}
    numbers = sorted(floors, key=lambda pipelines: min(floors[pipelines]))
    best = _best(search, {pipelines: floors[pipelines] for pipelines in numbers}, patience)
    if best is None and patience.limit is not None:
        return ()
    if best is None:
        sizes = ", ".join(map(str, sorted(demand.costs)))
        raise PlanInfeasible(
            f"no {demand.numbers.start} to {demand.numbers[-1]} pipelines of {sizes} nodes use "
            f"exactly {count(demand.nodes, 'node')}"
        )
    found, within = [best], best.step + int(best.step * BAND)
    search.be_quick()
    for pipelines in numbers[: 3 * patience.most]:
        if len(found) < patience.most and pipelines != len(best.sizes):
            other = search.best(pipelines, floors[pipelines], within)
            found.extend([other] if other else [])
    return tuple(_instantiation(demand, one.sizes, one.step) for one in found)


def _best(search: SizeSearch, floors: Mapping[int, Floats], patience: Patience) -> BestSizes | None:
    """The best of all numbers of pipelines, looked at in the order of `floors`."""
    limit, best = patience.limit, None
    for pipelines, floor in floors.items():
        if best is not None:
            # One that is only as fast must have more pipelines.
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

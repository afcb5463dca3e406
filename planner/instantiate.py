"""Pipeline instantiation: how many pipelines of which template, and their shares of the batch.

Minimises the estimated step time of Oobleck §4.2: the slowest pipeline's share plus gradient sync.
Ties go to more pipelines, which survive more losses. Owns no formula: they are in
`oobleck.planner.cost`.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence

from oobleck.planner.cost import PipelineCost, pipeline_cost, sync_ticks
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.plan import Pipeline, Plan, place
from oobleck.planner.profile import Links, Profile
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.units import are, count


def instantiate(
    templates: Mapping[int, PipelineTemplate],
    nodes: Sequence[NodeName],
    *,
    profile: Profile,
    microbatches: int,
    min_pipelines: int,
    generation: Generation,
) -> Plan:
    """The plan with the smallest estimated step time that uses all `nodes`.

    Bigger pipelines come first; nodes are taken by name. Where no combination of templates uses
    all of them (more nodes than layers and micro-batches have use for), the last ones are left
    out. Raises PlanInfeasible.
    """
    names = sorted(nodes)
    sizes = _use_most(templates, len(names), profile, microbatches, min_pipelines)
    shares = share_batch([pipeline_cost(templates[size], profile) for size in sizes], microbatches)
    pipelines: list[Pipeline] = []
    first_node = first_microbatch = 0
    for size, share in zip(sizes, shares, strict=True):
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


def _use_most(
    templates: Mapping[int, PipelineTemplate],
    nodes: int,
    profile: Profile,
    microbatches: int,
    min_pipelines: int,
) -> tuple[int, ...]:
    reason: PlanInfeasible | None = None
    for used in range(nodes, 0, -1):
        try:
            return choose_sizes(
                templates,
                used,
                profile=profile,
                microbatches=microbatches,
                min_pipelines=min_pipelines,
            )
        except PlanInfeasible as infeasible:
            reason = reason or infeasible  # the one for all nodes says most
    raise reason or PlanInfeasible("there are no nodes")


def share_batch(costs: Sequence[PipelineCost], microbatches: int) -> tuple[int, ...]:
    """Micro-batches per pipeline, at least one each, so that the slowest is done soonest."""
    if len(costs) > microbatches:
        raise PlanInfeasible(
            f"{len(costs)} pipelines need as many micro-batches, and the batch has {microbatches}; "
            "enlarge global_batch or lower microbatch"
        )
    shares = [1] * len(costs)
    done = [(cost.time(2), index) for index, cost in enumerate(costs)]
    heapq.heapify(done)
    for _ in range(microbatches - len(costs)):
        _, index = done[0]
        shares[index] += 1
        heapq.heapreplace(done, (costs[index].time(shares[index] + 1), index))
    return tuple(shares)


def choose_sizes(
    templates: Mapping[int, PipelineTemplate],
    nodes: int,
    *,
    profile: Profile,
    microbatches: int,
    min_pipelines: int,
) -> tuple[int, ...]:
    """The sizes of the pipelines of the best plan, biggest first; they add up to `nodes`."""
    if not templates:
        raise PlanInfeasible("there are no templates to choose from")
    costs = {size: pipeline_cost(template, profile) for size, template in templates.items()}
    most = min(nodes // min(templates), microbatches)
    if most < min_pipelines:
        raise PlanInfeasible(*_too_few(min(templates), nodes, microbatches, min_pipelines))
    best: tuple[int, int, tuple[int, ...]] | None = None
    for pipelines in range(max(1, min_pipelines), most + 1):
        limit = best and best[0]
        for step, sizes in _improving(costs, nodes, pipelines, microbatches, profile.links, limit):
            if best is None or (step, -pipelines) < best[:2]:
                best = step, -pipelines, sizes
    if best is None:
        sizes_text = ", ".join(map(str, sorted(templates)))
        raise PlanInfeasible(
            f"no {max(1, min_pipelines)} to {most} pipelines of {sizes_text} nodes use exactly "
            f"{count(nodes, 'node')}"
        )
    return best[2]


def _too_few(smallest: int, nodes: int, microbatches: int, min_pipelines: int) -> Iterator[str]:
    if nodes < smallest * min_pipelines:
        yield (
            f"needs {count(smallest * min_pipelines, 'node')}: {count(min_pipelines, 'pipeline')} "
            f"of at least {count(smallest, 'node')}; {are(nodes)} live"
        )
    if microbatches < min_pipelines:
        yield (
            f"{min_pipelines} pipelines need as many micro-batches, and the batch has "
            f"{microbatches}; enlarge global_batch or lower microbatch"
        )


def _improving(
    costs: Mapping[int, PipelineCost],
    nodes: int,
    pipelines: int,
    microbatches: int,
    links: Links,
    limit: int | None,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Better and better (step time, sizes) of exactly that many pipelines; the last is the best.

    The set with the largest capacity within a time bound is made, its own time becomes the next
    bound, until none is faster. Then the sizes whose gradient sync is as slow as the result's are
    left out and it begins anew, as long as sync may gain more than the pipelines have lost.
    """
    allowed = dict(costs)
    while allowed:
        least_sync = min(_sync(cost, pipelines, links) for cost in allowed.values())
        fastest: tuple[int, tuple[int, ...]] | None = None
        bound = None if limit is None else limit - least_sync
        while True:
            sizes = _most_capacity(allowed, nodes, pipelines, microbatches, bound)
            if sizes is None:
                break
            chosen = [allowed[size] for size in sizes]
            shares = share_batch(chosen, microbatches)
            time = max(cost.time(share) for cost, share in zip(chosen, shares, strict=True))
            fastest = time, sizes
            bound = time - 1
        if fastest is None:
            return
        time, sizes = fastest
        sync = max(_sync(allowed[size], pipelines, links) for size in sizes)
        if limit is None or time + sync <= limit:
            limit = time + sync
            yield limit, sizes
        allowed = {
            size: cost for size, cost in allowed.items() if _sync(cost, pipelines, links) < sync
        }


def _sync(cost: PipelineCost, pipelines: int, links: Links) -> int:
    return sync_ticks(cost.gradient_bytes, pipelines=pipelines, links=links)


def _most_capacity(
    costs: Mapping[int, PipelineCost],
    nodes: int,
    pipelines: int,
    microbatches: int,
    bound: int | None,
) -> tuple[int, ...] | None:
    """The sizes, biggest first, of exactly that many pipelines on exactly that many nodes that do
    most micro-batches within `bound`; None if those are fewer than there are."""
    capacities = {
        size: microbatches if bound is None else cost.capacity(bound, microbatches)
        for size, cost in sorted(costs.items())
    }
    usable = [(size, capacity) for size, capacity in capacities.items() if capacity]
    if not usable:
        return None
    smallest, biggest = usable[0][0], usable[-1][0]
    # rows[p][n]: (capacity, size of the last pipeline) of p pipelines on n nodes
    rows: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for made in range(1, pipelines + 1):
        left = pipelines - made
        row: dict[int, tuple[int, int]] = {}
        for used, (capacity, _) in rows[-1].items():
            for size, more in usable:
                total = used + size
                if total + left * smallest > nodes:
                    break
                if total + left * biggest < nodes:
                    continue
                if total not in row or row[total][0] < capacity + more:
                    row[total] = capacity + more, size
        rows.append(row)
    if rows[-1].get(nodes, (0, 0))[0] < microbatches:
        return None
    sizes = []
    rest = nodes
    for row in reversed(rows[1:]):
        sizes.append(row[rest][1])
        rest -= sizes[-1]
    return tuple(sorted(sizes, reverse=True))

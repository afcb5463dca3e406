"""Reconfiguration: from a plan and the live nodes to the next plan (Oobleck §5).

All ways into the next plan are candidates (`oobleck.planner.recovery.changes`): the paper's rules
applied to the hit pipelines, and new sizes for all live nodes
(`oobleck.planner.search.instantiate`). The criteria, in this order:

1. kept guarantees: as many pipelines as f asks for, as far as the nodes allow it, and no idle node;
2. step time, with the time to move state spread over the time that the plan is used for (`USE_S`);
   candidates within a band of the best are equal;
3. where no node is lost, the most pipelines, which survive more losses; after a loss the job waits
   for its state, so bytes come first;
4. bytes of state that move (`oobleck.planner.recovery.placement`);
5. the paper's order of rules: reinstantiate, borrow, merge, then new sizes.

Owns the plan of templates. Must not know the workers' real holdings:
`oobleck.planner.programs.transfer` checks whether all layers are still held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan, Templates
from oobleck.core.profile import Profile
from oobleck.core.units import are, count
from oobleck.planner.recovery.changes import Change, by_rules, reshaped
from oobleck.planner.recovery.placement import Seats, Slot, plan_kinds, put_in_place, seat
from oobleck.planner.recovery.rules import Reconfiguration
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
from oobleck.planner.search.instantiate import Patience, choose, most_used, template_costs
from oobleck.planner.search.templates import feasible_sizes, generate_templates

#: Seconds that a plan is expected to be used for, over which its transfer is spread: the paper's
#: worst case is a loss every ten minutes.
USE_S = 600.0
#: Costs this close, as parts of the best step time, are equal: the estimate is not more exact.
TIE = Fraction(1, 100)
#: Most sizes whose step time is judged.
_MOST_JUDGED = 6
#: Most of these that are new sizes.
_MOST_ANEW = 4
#: Effort of the search for new sizes (`oobleck.planner.search.instantiate.Patience`): some 10 ms.
_EFFORT = 8000


def can_lose(plan: Plan) -> int:
    """Return how many nodes can be lost at a time, whichever they are, without losing a layer."""
    return min(map(len, plan.layer_nodes())) - 1


def reconfigure(
    plan: Plan,
    live: Sequence[NodeName],
    *,
    templates: Templates,
    profile: Profile,
    fault_tolerance: int,
    generation: Generation,
    judge: Judge = by_formula,
    costs: Costs | None = None,
) -> Reconfiguration:
    """Return the plan for the `live` nodes; raises PlanInfeasible when they cannot hold the model.

    `judge` estimates step times; `costs` are those of the templates, where the caller has them.
    """
    alive, before = frozenset(live), frozenset(plan.nodes)
    smallest = min(templates)
    if len(alive) < smallest:
        raise PlanInfeasible(
            f"needs at least {count(smallest, 'node')} to hold the model; {are(len(alive))} live"
        )
    costs = template_costs(templates, profile) if costs is None else costs
    means = _Means(templates=templates, costs=costs, judge=judge)
    means, demand = _for_nodes(len(alive), means, plan, profile, fault_tolerance)
    if before <= alive and demand.nodes <= len(before):
        # Nodes that this plan leaves idle fit into no other plan either.
        return Reconfiguration(
            plan=plan.having(generation=generation),
            rule="replace",
            reason="the nodes are the same: the placement stays",
            idle=tuple(sorted(alive - before)),
        )
    changes, steps = _changes(plan, alive, demand)
    close = worth_judging(demand, steps, most=_MOST_JUDGED)
    anew = [reshaped(sizes, plan, alive) for sizes in close if sizes not in steps]
    timed = _timed([*changes, *anew], _judged(close, demand, means.judge))
    best, seats = _least_cost(timed, plan, alive, means.templates, profile)
    next_plan = put_in_place(
        best.slots,
        seats,
        _shares(best.slots, demand),
        plan,
        templates=means.templates,
        generation=generation,
    )
    return Reconfiguration(
        plan=next_plan,
        rule=best.rule,
        reason=best.reason,
        idle=tuple(sorted(alive - set(next_plan.nodes))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Means:
    """Inputs for making plans and comparing them."""

    templates: Templates
    costs: Costs
    judge: Judge


def _for_nodes(
    nodes: int, means: _Means, plan: Plan, profile: Profile, fault_tolerance: int
) -> tuple[_Means, Demand]:
    """Return the demand for as many of `nodes` nodes as can be used, and the means for it, with
    further templates where those help."""
    smallest, batch = min(means.templates), plan.microbatches
    wanted = min(fault_tolerance + 1, nodes // smallest, batch)
    used = most_used(means.costs, nodes, least=wanted, most=batch)
    if used < nodes:
        # The templates were made for the previous nodes and may lack sizes for the remaining ones.
        feasible = [n for n in feasible_sizes(profile, nodes) if n > smallest]
        most = most_used((smallest, *feasible), nodes, least=wanted, most=batch)
        if most > used:
            used = most
            means = _with_sizes([n for n in feasible if n not in means.templates], means, profile)
    return means, Demand(
        costs=means.costs,
        nodes=used,
        microbatches=batch,
        min_pipelines=wanted,
        links=profile.links,
    )


def _with_sizes(sizes: Sequence[int], means: _Means, profile: Profile) -> _Means:
    more = [generate_templates(profile, range(size, size + 1)) for size in sizes]
    templates = {n: t for part in (means.templates, *more) for n, t in part.items()}
    # The judge knows only the templates that it was made for.
    return _Means(templates=templates, costs=template_costs(templates, profile), judge=by_formula)


def _changes(
    plan: Plan, alive: frozenset[NodeName], demand: Demand
) -> tuple[list[Change], dict[Sizes, int]]:
    """List the changes that lose no guarantee, in the order of rules; also return the ticks of
    their sizes."""
    changes = [
        change
        for change in by_rules(plan, alive, demand.costs)
        if len(change.slots) in demand.numbers and sum(change.sizes) == demand.nodes
    ]
    steps = {sizes: demand.step(sizes) for sizes in dict.fromkeys(c.sizes for c in changes)}
    quick = min(steps.values(), default=None)
    patience = Patience(
        most=_MOST_ANEW,
        # The judge may find sizes shorter that are within the band of the formula's best.
        limit=None if quick is None else quick + int(quick * BAND),
        slack=TIE,
        effort=_EFFORT,
    )
    anew = choose(demand, patience)
    changes += [reshaped(one.sizes, plan, alive) for one in anew]
    return changes, steps | {one.sizes: one.step for one in anew}


def _judged(close: Mapping[Sizes, int], demand: Demand, judge: Judge) -> dict[Sizes, float]:
    """Return the step time of each by the judge; a single candidate is not judged."""
    if len(close) == 1:
        return dict.fromkeys(close, 1.0)
    times = judge(
        [
            Instantiation(sizes=sizes, shares=demand.shares(sizes), step=step)
            for sizes, step in close.items()
        ]
    )
    return dict(zip(close, times, strict=True))


def _timed(changes: Sequence[Change], judged: Mapping[Sizes, float]) -> list[tuple[float, Change]]:
    """Return changes to `judged` sizes with their times: the first for each set of sizes and of
    pipelines that stay."""
    kept: dict[object, tuple[float, Change]] = {}
    for change in changes:
        if change.sizes in judged:
            stay = tuple(slot.kept.nodes for slot in change.slots if slot.kept)
            kept.setdefault((change.sizes, stay), (judged[change.sizes], change))
    return list(kept.values())


def _least_cost(
    timed: Sequence[tuple[float, Change]],
    plan: Plan,
    alive: frozenset[NodeName],
    templates: Templates,
    profile: Profile,
) -> tuple[Change, Seats]:
    """Return the change of least cost of step time and transfer, with its seats.

    Ties go to the most pipelines if no node is lost, then to the fewest bytes, then to the first.
    """
    fastest = min(time for time, _ in timed)
    state_bytes = [layer.travelling_bytes for layer in profile.layers]
    rate = profile.links.inter_node_bytes_per_s
    held = plan_kinds(plan)
    least = float("inf")
    ways: list[tuple[float, int, int, Change, Seats]] = []
    for number, (time, change) in sorted(enumerate(timed), key=lambda one: one[1][0]):
        cost = time / fastest if fastest else 1.0
        if cost > least + TIE:
            break  # the transfer only adds to the step time
        seats = seat(
            change.slots, plan, alive, templates=templates, state_bytes=state_bytes, held=held
        )
        cost += seats.busiest_bytes / rate / USE_S
        least = min(least, cost)
        ways.append((cost, seats.moved_bytes, number, change, seats))
    close = [way for way in ways if way[0] <= least + TIE]
    if alive.issuperset(plan.nodes):
        most = max(len(change.slots) for *_, change, _ in close)
        close = [way for way in close if len(way[3].slots) == most]
    *_, best, seats = min(close, key=lambda way: way[1:3])
    return best, seats


def _shares(slots: Sequence[Slot], demand: Demand) -> list[int]:
    """Share the batch among the slots as the judge did: by size, biggest first."""
    order = sorted(range(len(slots)), key=lambda number: -slots[number].size)
    shares = demand.shares([slots[number].size for number in order])
    return [share for _, share in sorted(zip(order, shares, strict=True))]

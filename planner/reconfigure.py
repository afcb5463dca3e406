"""Reconfiguration: from a plan and the nodes that live now to the next plan (Oobleck §5).

After a loss every hit pipeline is put right by the first rule that can: *reinstantiate* it with a
smaller template, *borrow* nodes from pipelines that can spare them, or *merge* it with another
one. Pipelines that no rule touches keep their nodes and stages. Where no chain of rules works, and
when nodes join, all sizes are chosen anew and pipelines of the right size stay. In either case
the nodes are put into place so that the fewest bytes of state move, and the batch is shared anew.

Owns the choice of rule; `oobleck.planner.rules` has the rules, and `oobleck.planner.placement`
puts nodes into place. Must not know who holds
what in truth: `oobleck.planner.transfer` finds out whether all layers are still there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.instantiate import choose_sizes
from oobleck.planner.placement import Slot, keep_fitting, put_in_place
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.planner.rules import RULES, Group, Groups, Rule
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.templates import feasible_sizes, generate_templates
from oobleck.planner.units import are, count

Templates = Mapping[int, PipelineTemplate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """The next plan, the strongest rule that led to it, and what happened in words."""

    plan: Plan
    rule: Rule
    reason: str
    #: Live nodes that no combination of templates has a use for: the plan is without them.
    idle: tuple[NodeName, ...] = ()


def can_lose(plan: Plan) -> int:
    """How many nodes, whichever they are, can be lost at a time without losing a layer."""
    holders: list[set[NodeName]] = [set() for _ in range(plan.layer_count)]
    for worker, layers in plan.holdings().items():
        for layer in layers:
            holders[layer].add(worker.node)
    return min(len(nodes) for nodes in holders) - 1


def reconfigure(
    plan: Plan,
    live: Sequence[NodeName],
    *,
    templates: Templates,
    profile: Profile,
    fault_tolerance: int,
    generation: Generation,
) -> Reconfiguration:
    """The plan for the `live` nodes; raises PlanInfeasible when they cannot hold the model."""
    alive, before = frozenset(live), frozenset(plan.nodes)
    smallest = min(templates)
    if len(alive) < smallest:
        raise PlanInfeasible(
            f"needs at least {count(smallest, 'node')} to hold the model; {are(len(alive))} live"
        )
    same = Reconfiguration(
        plan=replace(plan, generation=generation),
        rule="replace",
        reason="the nodes are the same: the placement stays",
        idle=tuple(sorted(alive - before)),
    )
    if alive == before:
        return same
    table = templates
    biggest = max(len(pipeline.nodes) for pipeline in plan.pipelines)
    if biggest not in templates:  # an earlier reconfiguration went beyond them
        table = _extend(templates, biggest, profile, smallest)
    wanted = min(fault_tolerance + 1, len(alive) // smallest, plan.microbatches)
    outcome = _mend(plan, alive, table, smallest, wanted) if alive < before else None
    if outcome is None:
        outcome, table = _choose_anew(plan, alive, table, profile, smallest, wanted)
    next_plan = put_in_place(
        outcome.slots, plan, alive, templates=table, profile=profile, generation=generation
    )
    if before <= alive and len(next_plan.nodes) <= len(before):
        return same  # those that are not in the plan are of no use to any other one
    return Reconfiguration(
        plan=next_plan,
        rule=outcome.rule,
        reason=outcome.reason,
        idle=tuple(sorted(alive - set(next_plan.nodes))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    slots: tuple[Slot, ...]
    rule: Rule
    reason: str


# ---- mending pipeline by pipeline


def _mend(
    plan: Plan, alive: frozenset[NodeName], table: Templates, smallest: int, wanted: int
) -> _Outcome | None:
    """All hit pipelines put right by the rules; None where the rules do not get there."""
    groups, stories = _hit_groups(plan, alive)
    stop = smallest  # the rules use the sizes without a gap
    while stop in table:
        stop += 1
    used: set[Rule] = {"reinstantiate"}
    while hit := [i for i, group in enumerate(groups) if group.hit]:
        for rule, function in RULES:
            result = function(groups, hit[0], range(smallest, stop))
            if result is not None:
                groups, story = result
                stories = (*stories, story)
                used.add(rule)
                break
        else:
            return None
    if len(groups) < wanted:
        return None
    strongest = next(rule for rule, _ in reversed(RULES) if rule in used)
    slots = tuple(Slot(size=g.size, kept=g.kept, origin=g.origin) for g in groups)
    return _Outcome(slots=slots, rule=strongest, reason="; ".join(stories))


def _hit_groups(plan: Plan, alive: frozenset[NodeName]) -> tuple[Groups, tuple[str, ...]]:
    groups, gone = [], []
    for number, pipeline in enumerate(plan.pipelines):
        lost = ", ".join(node for node in pipeline.nodes if node not in alive)
        left = sum(node in alive for node in pipeline.nodes)
        name = f"pipeline {number} lost {lost}" if lost else f"pipeline {number}"
        if not left:
            gone.append(f"{name}: all its nodes; the others take over its share")
            continue
        groups.append(
            Group(
                name=name,
                template=len(pipeline.nodes),
                size=left,
                kept=None if lost else pipeline,
                origin=pipeline,
                hit=bool(lost),
            )
        )
    return tuple(groups), tuple(gone)


# ---- all sizes anew


def _choose_anew(
    plan: Plan,
    alive: frozenset[NodeName],
    table: Templates,
    profile: Profile,
    smallest: int,
    wanted: int,
) -> tuple[_Outcome, Templates]:
    """Sizes for as many of the nodes as any combination can use, and the templates with them.

    Raises PlanInfeasible.
    """
    extended: Templates | None = None
    for nodes in range(len(alive), smallest - 1, -1):
        sizes = _sizes(table, nodes, wanted, plan, profile)
        if sizes is None:
            # E.g. sizes {2} for 3 nodes: the cluster began with no more than it needed.
            extended = extended or _extend(table, len(alive), profile, smallest)
            sizes = _sizes(extended, nodes, wanted, plan, profile)
        if sizes is not None:
            slots = keep_fitting(sizes, plan, alive)
            outcome = _Outcome(
                slots=slots,
                rule=_rule_anew(plan, alive, slots),
                reason=_reason_anew(plan, alive, sizes, len(alive) - nodes),
            )
            return outcome, extended or table
    raise PlanInfeasible(f"no combination of templates fits {count(len(alive), 'node')}")


def _extend(table: Templates, most: int, profile: Profile, smallest: int) -> Templates:
    """With all sizes up to `most` that fit."""
    missing = [n for n in feasible_sizes(profile, most) if n >= smallest and n not in table]
    more = [generate_templates(profile, range(size, size + 1)) for size in missing]
    return {size: template for part in (table, *more) for size, template in part.items()}


def _sizes(
    table: Templates, nodes: int, wanted: int, plan: Plan, profile: Profile
) -> tuple[int, ...] | None:
    for pipelines in range(wanted, 0, -1):
        try:
            return choose_sizes(
                table,
                nodes,
                profile=profile,
                microbatches=plan.microbatches,
                min_pipelines=pipelines,
            )
        except PlanInfeasible:
            continue
    return None


def _rule_anew(plan: Plan, alive: frozenset[NodeName], slots: tuple[Slot, ...]) -> Rule:
    if alive - set(plan.nodes):
        return "join"
    survivors = sum(any(node in alive for node in p.nodes) for p in plan.pipelines)
    return "merge" if len(slots) < survivors else "reinstantiate"


def _reason_anew(plan: Plan, alive: frozenset[NodeName], sizes: tuple[int, ...], idle: int) -> str:
    before = frozenset(plan.nodes)
    changes = [
        f"{', '.join(sorted(nodes))} {verb}"
        for nodes, verb in ((before - alive, "lost"), (alive - before, "joined"))
        if nodes
    ]
    old = ", ".join(str(len(pipeline.nodes)) for pipeline in plan.pipelines)
    new = ", ".join(map(str, sizes))
    spare = f"; no combination of templates has a use for {idle} of the nodes" if idle else ""
    return f"{' and '.join(changes)}: templates {old} -> templates {new}{spare}"

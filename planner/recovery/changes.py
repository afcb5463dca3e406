"""Candidates of reconfiguration: all ways from a plan to one for the live nodes.

Some apply the paper's rules to the hit pipelines, in any combination
(`oobleck.planner.recovery.rules`), with newcomers in pipelines of their own or in existing ones.
Others have given sizes, with whole pipelines kept where possible. Owns the candidates and their
descriptions. Must not know which one is best: `oobleck.planner.recovery.reconfigure` compares them.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from oobleck.core.ids import NodeName
from oobleck.core.plan import Plan
from oobleck.planner.recovery.placement import Slot, keep_fitting
from oobleck.planner.recovery.rules import (
    Group,
    Groups,
    Rule,
    enlarge,
    found_pipelines,
    mend,
    refill,
)

#: Most combinations of rules for the hit pipelines; that is all of them for up to three.
_MOST_WAYS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change to the next plan: its pipelines, its rule, and its description."""

    slots: tuple[Slot, ...]
    rule: Rule
    reason: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes per pipeline, biggest first."""
        return tuple(sorted((slot.size for slot in self.slots), reverse=True))


def by_rules(plan: Plan, alive: frozenset[NodeName], known: Collection[int]) -> Iterator[Change]:
    """Yield changes with templates of `known` sizes, in the paper's order of rules.

    Some may leave nodes unused, or have fewer pipelines than before.
    """
    groups, gone = _hit_groups(plan, alive)
    stop = min(known)  # the rules need consecutive sizes
    while stop in known:
        stop += 1
    sizes = range(min(known), stop)
    newcomers = len(alive - set(plan.nodes))
    if not newcomers:
        for way in mend(groups, sizes, most=_MOST_WAYS):
            reason = "; ".join((*gone, *way.stories))
            yield Change(slots=_slots(way.groups), rule=way.rule, reason=reason)
        return
    for filled, left in dict.fromkeys((refill(groups, newcomers), (groups, newcomers))):
        for way in mend(filled, sizes, most=_MOST_WAYS):
            for function in (found_pipelines, enlarge):
                joined = function(way.groups, left, sizes) if left else way.groups
                if joined is not None:
                    yield change_to(_slots(joined), plan, alive)


def reshaped(sizes: Sequence[int], plan: Plan, alive: frozenset[NodeName]) -> Change:
    """Return pipelines of these sizes, with those of `plan` that can stay."""
    return change_to(keep_fitting(sizes, plan, alive), plan, alive)


def change_to(slots: tuple[Slot, ...], plan: Plan, alive: frozenset[NodeName]) -> Change:
    """Build the change to slots that come from no rule, with its description."""
    before = frozenset(plan.nodes)
    changes = [
        f"{', '.join(sorted(nodes))} {verb}"
        for nodes, verb in ((before - alive, "lost"), (alive - before, "joined"))
        if nodes
    ]
    old = _listed([len(pipeline.nodes) for pipeline in plan.pipelines])
    new = _listed(sorted((slot.size for slot in slots), reverse=True))
    idle = len(alive) - sum(slot.size for slot in slots)
    spare = f"; no combination of templates has a use for {idle} of the nodes" if idle else ""
    cause = " and ".join(changes) or "the best shape"
    return Change(
        slots=slots,
        rule="join" if alive - before else "reshape",
        reason=f"{cause}: templates {old} -> templates {new}{spare}",
    )


def _listed(sizes: Sequence[int]) -> str:
    """List sizes such as `3, 2, 2`; more than four equal ones in a row as `3, 2 (x12)`."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return ", ".join(
        f"{size} (x{number})" if number > 4 else ", ".join([str(size)] * number)
        for size, number in runs
    )


def _slots(groups: Groups) -> tuple[Slot, ...]:
    return tuple(Slot(size=g.size, kept=g.kept, origin=g.origin) for g in groups)


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

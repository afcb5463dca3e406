"""The three rules that put a hit pipeline right (Oobleck §5), on sizes alone.

Each takes the pipelines as they stand after the loss and the index of a hit one, and gives them
back with that one put right, with the story in words, or None where it does not apply. Which
nodes go where is no matter here: `oobleck.planner.placement` decides that for all at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.planner.plan import Pipeline

Rule = Literal["reinstantiate", "borrow", "merge", "join", "replace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A pipeline on its way into the next plan."""

    name: str
    #: Its template's nodes in the plan before.
    template: int
    #: Nodes that it has now, in number.
    size: int
    #: As before, untouched.
    kept: Pipeline | None
    #: The pipeline that it was; None after a merge.
    origin: Pipeline | None
    #: It is hit and no rule has put it right yet.
    hit: bool = False


Groups = tuple[Group, ...]
#: Puts the hit group at an index right: the groups after it and the story; None: cannot.
RuleFunction = Callable[[Groups, int, range], tuple[Groups, str] | None]


def reinstantiate(groups: Groups, index: int, sizes: range) -> tuple[Groups, str] | None:
    """A smaller template for the nodes that are left, if they are enough."""
    group = groups[index]
    if group.size not in sizes:
        return None
    story = f"{group.name}: template {group.template} -> template {group.size}"
    return _with(groups, {index: replace(group, hit=False)}), story


def borrow(groups: Groups, index: int, sizes: range) -> tuple[Groups, str] | None:
    """Nodes from the largest pipelines that still fit the model without them."""
    group, now = groups[index], list(groups)
    if group.size >= sizes.start:
        return None
    lenders: list[int] = []
    while now[index].size < sizes.start:
        spare = [i for i, g in enumerate(now) if i != index and g.size - 1 in sizes]
        if not spare:
            return None
        lender = max(spare, key=lambda i: (now[i].size, -i))
        now[lender] = replace(now[lender], size=now[lender].size - 1, kept=None)
        now[index] = replace(now[index], size=now[index].size + 1)
        lenders.append(lender)
    given = [
        f"{lenders.count(i)} from {groups[i].name} (template {groups[i].size} -> template "
        f"{now[i].size})"
        for i in sorted(set(lenders))
    ]
    now[index] = replace(now[index], hit=False)
    story = (
        f"{group.name}: template {group.template} -> template {now[index].size} with nodes "
        f"borrowed: {', '.join(given)}"
    )
    return tuple(now), story


def merge(groups: Groups, index: int, sizes: range) -> tuple[Groups, str] | None:
    """One pipeline out of the hit one and the smallest other one."""
    group = groups[index]
    others = [i for i in range(len(groups)) if i != index]
    if not others:
        return None
    other = min(others, key=lambda i: (groups[i].size, i))
    size = group.size + groups[other].size
    if size >= sizes.stop:
        return None
    merged = Group(
        name=f"{group.name} merged with {groups[other].name}",
        template=group.template + groups[other].template,
        size=size,
        kept=None,
        origin=None,
        hit=size not in sizes,
    )
    story = (
        f"{group.name} and {groups[other].name} merge: templates {group.template} and "
        f"{groups[other].template} -> template {size}"
    )
    changed = _with(groups, {min(index, other): merged})
    gone = max(index, other)
    return (*changed[:gone], *changed[gone + 1 :]), story


RULES: tuple[tuple[Rule, RuleFunction], ...] = (
    ("reinstantiate", reinstantiate),
    ("borrow", borrow),
    ("merge", merge),
)


def _with(groups: Groups, changed: Mapping[int, Group]) -> Groups:
    return tuple(changed.get(i, group) for i, group in enumerate(groups))

"""The three rules that repair a hit pipeline (Oobleck §5), and joining, on sizes alone.

Each rule takes the pipelines after the loss and the index of a hit one. It returns them with that
one repaired and a description, or None where it does not apply. The placement of nodes is left to
`oobleck.planner.recovery.placement`, for all at once, and the choice of the best way to
`oobleck.planner.recovery.reconfigure`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.core.ids import NodeName
from oobleck.core.plan import Pipeline, Plan

#: Origin of a plan: one of the paper's three rules, a candidate of
#: `oobleck.planner.recovery.uneven` for slow workers, or one of these.
#:
#: - "takeover": the others take the shares of pipelines lost whole;
#: - "reshape": new sizes;
#: - "join": newcomers;
#: - "replace": the same nodes;
#: - "reroute": no template, around lost workers;
#: - "shadow": layers on more nodes;
#: - "normalise": layers of a lost worker in place of others.
Rule = Literal[
    "takeover",
    "reinstantiate",
    "borrow",
    "merge",
    "reshape",
    "join",
    "replace",
    "reroute",
    "shadow",
    "normalise",
    "as planned",
    "reshare",
    "partial reroute",
    "recut",
    "stand by",
    "take back",
]
#: Follow-up of an answer at a step boundary; for `shadow` see `oobleck.planner.recovery.worth`.
#: `anew`: the shape of a first plan.
Next = Literal["templates", "shadow", "normalise", "anew"]
#: Rules that make a plan of templates for fewer or more nodes.
OF_OTHER_NODES: frozenset[Rule] = frozenset({"stand by", "take back"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfiguration:
    """Next plan, the strongest rule that led to it, and a description."""

    plan: Plan
    rule: Rule
    reason: str
    #: Live nodes that fit into no combination of templates; the plan leaves them out.
    idle: tuple[NodeName, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pipeline while the next plan is made."""

    name: str
    #: Nodes of its template in the previous plan.
    template: int
    #: Number of its nodes now.
    size: int
    #: The previous pipeline, if untouched.
    kept: Pipeline | None
    #: The pipeline that it was; None after a merge.
    origin: Pipeline | None
    #: True if it is hit and not repaired yet.
    hit: bool = False


Groups = tuple[Group, ...]
#: Repairs the hit group at an index: returns the groups and a description, or None if it cannot.
RuleFunction = Callable[[Groups, int, range], tuple[Groups, str] | None]


def reinstantiate(groups: Groups, index: int, sizes: range) -> tuple[Groups, str] | None:
    """Use a smaller template for the remaining nodes, if they are enough."""
    group = groups[index]
    if group.size not in sizes:
        return None
    story = f"{group.name}: template {group.template} -> template {group.size}"
    return _with(groups, {index: replace(group, hit=False)}), story


def borrow(groups: Groups, index: int, sizes: range) -> tuple[Groups, str] | None:
    """Borrow nodes from the largest pipelines that still fit the model without them."""
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
    """Merge the hit pipeline with the smallest other one; None where there is none, or the sum is
    too big."""
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


#: Ordered as in the paper; later rules disturb more.
RULES: tuple[tuple[Rule, RuleFunction], ...] = (
    ("reinstantiate", reinstantiate),
    ("borrow", borrow),
    ("merge", merge),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """Groups without any hit pipeline, with the rules applied and their descriptions."""

    groups: Groups
    #: The most disturbing of the rules used; "takeover" where none was needed.
    rule: Rule
    stories: tuple[str, ...]


def mend(groups: Groups, sizes: range, *, most: int) -> Iterator[Mended]:
    """Yield up to `most` ways to repair all hit groups, one rule after the other, in all orders of
    preference; the paper's comes first."""
    names: list[Rule] = ["takeover", *(name for name, _ in RULES)]
    made = 0
    open_ways: list[tuple[Groups, int, tuple[str, ...]]] = [(groups, 0, ())]
    while open_ways and made < most:
        now, strongest, stories = open_ways.pop()
        hit = next((index for index, group in enumerate(now) if group.hit), None)
        if hit is None:
            made += 1
            yield Mended(groups=now, rule=names[strongest], stories=stories)
            continue
        ways = [
            (result[0], max(strongest, strength), (*stories, result[1]))
            for strength, (_, function) in enumerate(RULES, start=1)
            if (result := function(now, hit, sizes)) is not None
        ]
        open_ways.extend(reversed(ways))


def refill(groups: Groups, newcomers: int) -> tuple[Groups, int]:
    """Give newcomers the places of lost nodes, group by group; also return how many remain."""
    filled = []
    for group in groups:
        more = min(newcomers, group.template - group.size) if group.hit else 0
        newcomers -= more
        filled.append(replace(group, size=group.size + more))
    return tuple(filled), newcomers


def found_pipelines(groups: Groups, newcomers: int, sizes: range) -> Groups | None:
    """Put newcomers into pipelines of their own, as small as possible."""
    count = newcomers // sizes.start
    if count == 0 or newcomers > count * (sizes.stop - 1):
        return None
    smaller, bigger = divmod(newcomers, count)
    own = [smaller + 1] * bigger + [smaller] * (count - bigger)
    fresh = (
        Group(name="newcomers", template=size, size=size, kept=None, origin=None) for size in own
    )
    return (*groups, *fresh)


def enlarge(groups: Groups, newcomers: int, sizes: range) -> Groups | None:
    """Give newcomers to the smallest pipelines one by one."""
    now = list(groups)
    for _ in range(newcomers):
        index = min(range(len(now)), key=lambda i: (now[i].size, -i), default=None)
        if index is None or now[index].size + 1 not in sizes:
            return None
        now[index] = replace(now[index], size=now[index].size + 1, kept=None)
    return tuple(now)


def _with(groups: Groups, changed: Mapping[int, Group]) -> Groups:
    return tuple(changed.get(i, group) for i, group in enumerate(groups))

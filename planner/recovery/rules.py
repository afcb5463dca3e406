"""The three rules that put a hit pipeline right (Oobleck §5), and joining, on sizes alone.

Each rule takes the pipelines as they stand after the loss and the index of a hit one, and gives
them back with that one put right, with the story in words, or None where it does not apply. Which
nodes go where is no matter here: `oobleck.planner.recovery.placement` decides that for all at once.
Nor is which way is the best: `oobleck.planner.recovery.reconfigure` compares them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.core.plan import Pipeline

#: How a plan came about, by the paper's three or: "takeover", of pipelines lost whole the others
#: take the shares; "reshape", sizes chosen anew; "join", newcomers; "replace", the same nodes;
#: "reroute", no template: around lost workers; "shadow", layers on more nodes; "normalise",
#: the layers of a lost worker in place of others; or, for slow
#: workers, by the candidates of `oobleck.planner.recovery.uneven`.
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
#: What comes behind an answer, at a step boundary; `shadow`: see
#: `oobleck.planner.recovery.shadowed`.
Next = Literal["templates", "shadow", "normalise"]
#: Of the rules, those that make a plan of templates, for fewer or more nodes.
OF_OTHER_NODES: frozenset[Rule] = frozenset({"stand by", "take back"})


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


#: In the paper's order; what comes later disturbs more.
RULES: tuple[tuple[Rule, RuleFunction], ...] = (
    ("reinstantiate", reinstantiate),
    ("borrow", borrow),
    ("merge", merge),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """No pipeline is hit any more; the rules that were used, and what they did."""

    groups: Groups
    #: Of those used the one that disturbs most; "takeover" where none was needed.
    rule: Rule
    stories: tuple[str, ...]


def mend(groups: Groups, sizes: range, *, most: int) -> Iterator[Mended]:
    """Up to `most` ways to put all hit groups right, one rule after the other, in all orders of
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
    """Newcomers take the places of lost nodes, group by group; how many are left over."""
    filled = []
    for group in groups:
        more = min(newcomers, group.template - group.size) if group.hit else 0
        newcomers -= more
        filled.append(replace(group, size=group.size + more))
    return tuple(filled), newcomers


def found_pipelines(groups: Groups, newcomers: int, sizes: range) -> Groups | None:
    """Newcomers make up pipelines of their own, as small as can be."""
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
    """Newcomers go to the smallest pipelines one by one."""
    now = list(groups)
    for _ in range(newcomers):
        index = min(range(len(now)), key=lambda i: (now[i].size, -i), default=None)
        if index is None or now[index].size + 1 not in sizes:
            return None
        now[index] = replace(now[index], size=now[index].size + 1, kept=None)
    return tuple(now)


def _with(groups: Groups, changed: Mapping[int, Group]) -> Groups:
    return tuple(changed.get(i, group) for i, group in enumerate(groups))

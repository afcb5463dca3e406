"""Plans on other nodes, and the spread of a layer's holders over racks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from msgspec import structs

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.plan import Plan

#: Most swaps of nodes that are tried to spread holders over racks.
_MOST_SWAPS = 4000


def over_racks(
    plan: Plan, racks: Mapping[NodeName, str], alike: Iterable[Sequence[NodeName]]
) -> Plan:
    """Return the plan, which has no rates or listing, with nodes swapped so that fewer layers have
    all holders in one rack. `alike`: groups of nodes that may swap places, idle ones included."""
    holders = [sorted(own) for own in dict.fromkeys(map(frozenset, plan.layer_nodes()))]
    # Seats are named after the nodes that have them in `plan`; idle nodes have seats of their own.
    group = {name: own for own in alike for name in own}
    at = {name: name for name in (*group, *plan.nodes)}
    of = defaultdict[NodeName, list[int]](list)
    for number, seats in enumerate(holders):
        for seat in seats if len(seats) > 1 else ():
            of[seat].append(number)

    def together(numbers: Iterable[int]) -> int:
        """Return how many of these sets of holders are in one rack."""
        by_set = ({racks.get(at[seat]) or at[seat] for seat in holders[n]} for n in numbers)
        return sum(len(labels) == 1 for labels in by_set)

    def swaps() -> Iterator[tuple[NodeName, NodeName]]:
        """Yield swaps that may spread a set of holders, as long as it is in one rack."""
        for number, seats in enumerate(holders):
            pairs = ((seat, other) for seat in seats for other in group.get(seat, ()))
            for seat, other in pairs if len(seats) > 1 else ():
                if racks.get(at[seat]) != racks.get(at[other]):
                    if not together([number]):
                        break
                    yield seat, other

    for seat, other in islice(swaps(), _MOST_SWAPS):
        concerned = {*of[seat], *of[other]}
        before = together(concerned)
        at[seat], at[other] = at[other], at[seat]
        if together(concerned) >= before:
            at[seat], at[other] = at[other], at[seat]
    return renamed(plan, at) if any(at[name] != name for name in plan.nodes) else plan


def renamed(plan: Plan, nodes: Mapping[NodeName, NodeName]) -> Plan:
    """Return the plan, which has no rates or listing, on other nodes."""

    def moved(workers: Iterable[WorkerId]) -> tuple[WorkerId, ...]:
        return tuple(WorkerId(nodes[worker.node], worker.slot) for worker in workers)

    routes = tuple(
        structs.replace(
            route,
            hops=tuple(structs.replace(hop, workers=moved(hop.workers)) for hop in route.hops),
        )
        for route in plan.routes
    )
    holds = tuple(structs.replace(one, workers=moved(one.workers)) for one in plan.holds)
    return replace(plan, holds=holds, routes=routes)

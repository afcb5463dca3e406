"""Fewer micro-batches for slow pipelines: shares of given pipelines by their rates."""

from collections.abc import Mapping
from dataclasses import replace
from heapq import heapify, heapreplace

from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.planner.cost.estimate import kinds_of
from oobleck.planner.cost.kinds import Cut, Kind
from oobleck.planner.cost.replay import computed_s

#: Share that few pipelines exceed, as a multiple of the average.
_USUAL = 4


def reshared(plan: Plan, profile: Profile) -> Plan:
    """Return `plan`, of pipelines, with the shares that minimise the time of the last pipeline.

    Each has at least one micro-batch. Each further one goes to the pipeline that would finish it
    first; ties go to the first pipeline. This is optimal, since more micro-batches never make a
    pipeline finish sooner.
    """
    cuts = {number: each.kind.cut for each in kinds_of(plan, profile) for number in each.numbers}
    all_but_one = plan.microbatches - len(plan.routes) + 1
    most = min(all_but_one, _USUAL * plan.microbatches // len(plan.routes) + 1)
    shares = _shares(plan, cuts, most)
    if max(shares) == most < all_but_one:
        shares = _shares(plan, cuts, all_but_one)
    routes = zip(plan.routes, shares, strict=True)
    return replace(plan, routes=tuple(replace(r, microbatches=share) for r, share in routes))


def _shares(plan: Plan, cuts: Mapping[int, Cut], most: int) -> list[int]:
    """Share the batch among the routes, with no share above `most`."""
    asked = [
        (plan.schedule, Kind(count, cut))
        for cut in dict.fromkeys(cuts.values())
        for count in range(1, most + 1)
    ]
    done_s = {kind: max(ends) for (_, kind), ends in computed_s(asked).items()}
    shares = [1] * len(plan.routes)
    heap = [(_next_s(done_s, Kind(2, cuts[n]), most), n) for n in range(len(shares))]
    heapify(heap)
    for _ in range(plan.microbatches - len(shares)):
        number = heap[0][1]
        shares[number] += 1
        following = Kind(shares[number] + 1, cuts[number])
        heapreplace(heap, (_next_s(done_s, following, most), number))
    return shares


def _next_s(done_s: dict[Kind, float], kind: Kind, most: int) -> float:
    return done_s[kind] if kind.microbatches <= most else float("inf")

"""Which gradients are summed over whom."""

import pytest

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.instructions import LayerPart, Share, Vote
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, Route
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.gradients import gradient_buckets, syncs_by_worker
from support.plans import plan_of_cuts, worker


def hold(first: int, last: int, *workers: WorkerId) -> Hold:
    return Hold(first_layer=first, last_layer=last, workers=workers)


def test_a_worker_sums_of_tied_layers_what_it_holds_of_each() -> None:
    """It holds one of them with another worker and one alone."""
    one, two, other = worker(0), worker(0, 1), worker(1)
    holds = (hold(0, 0, one, two), hold(1, 1, other), hold(2, 2, one))
    hops = tuple(
        Hop(first_layer=each.first_layer, last_layer=each.last_layer, workers=each.workers)
        for each in holds
    )
    plan = Plan(generation=Generation(1), holds=holds, routes=(Route(hops=hops, microbatches=2),))
    syncs = syncs_by_worker(gradient_buckets(plan, tied=True), plan)
    summed = {
        member: {(sync.owners, part) for sync in own for part in sync.parts if part.part == "tied"}
        for member, own in syncs.items()
    }

    def tied(layer: int, start: int) -> LayerPart:
        return LayerPart(layer=layer, part="tied", share=Share(start, start + 1, 2))

    assert summed == {
        one: {((one,), tied(0, 0)), ((one,), tied(2, 0)), ((one, two), tied(2, 1))},
        two: {((one, two), tied(0, 1))},
        other: set(),
    }


@pytest.mark.parametrize("cuts", [[5], [2, 3], [1, 1, 3]])
def test_what_layers_share_is_summed_over_all_who_hold_one_of_them_and_counts_once(
    cuts: list[int],
) -> None:
    """Also where two sets of layers have the same holders: each is a sum of its own."""
    ties = ((0, 2, 4), (1, 3))
    plan = plan_of_cuts(([5], 2), (cuts, 2))
    found = {}
    for bucket in gradient_buckets(plan, tied=ties):
        shared = tuple(sorted(part.layer for part in bucket.parts if part.part == "tied"))
        if shared:
            assert shared not in found
            found[shared] = set(bucket.owners)
    assert found == {
        places: {w for w in plan.workers if set(places) & set(plan.held[w])} for places in ties
    }
    votes = [program[-2] for program in compile_programs(plan, tied=ties).values()]
    counted = [
        part.layer
        for vote in votes
        if isinstance(vote, Vote)
        for part in vote.norm_parts
        if part.part == "tied"
    ]
    assert sorted(counted) == [0, 1]

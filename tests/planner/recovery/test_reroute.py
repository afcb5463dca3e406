"""Around lost workers: valid plans, all work with live holders, spread by load."""

import random
from collections import Counter

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, LayerLost, Route
from oobleck.planner.recovery.reroute import Spread, layer_count, reroute
from support.plans import hop, plan_of_cuts, worker
from support.routes import equal_pipelines, random_pipelines


def text(route: Route) -> str:
    """As in `6: 0-3 n1/0, 4-7 n2/0`."""
    hops = (
        f"{hop.first_layer}-{hop.last_layer} {'+'.join(map(str, hop.workers))}"
        for hop in route.hops
    )
    return f"{route.microbatches}: {', '.join(hops)}"


def routes(plan: Plan, *lost: WorkerId) -> list[str]:
    return [text(route) for route in reroute(plan, lost, generation=Generation(2)).routes]


def test_peers_share_the_micro_batches_of_a_lost_worker() -> None:
    assert routes(equal_pipelines(3, 2, 5), worker(5)) == [
        "5: 0-0 n0/0, 1-1 n1/0",
        "5: 0-0 n2/0, 1-1 n3/0",
        "3: 0-0 n4/0, 1-1 n1/0",
        "2: 0-0 n4/0, 1-1 n3/0",
    ]


def test_two_holes_in_one_pipeline() -> None:
    assert routes(equal_pipelines(2, 3, 4), worker(0), worker(2))[0] == (
        "4: 0-0 n3/0, 1-1 n1/0, 2-2 n5/0"
    )


def test_holes_side_by_side_become_one_hop_of_who_holds_both() -> None:
    plan = plan_of_cuts(([1, 1, 1], 4), ([1, 2], 4))
    assert routes(plan, worker(1), worker(2))[0] == "4: 0-0 n0/0, 1-2 n4/0"


def test_a_hole_is_covered_by_hops_of_other_cuts() -> None:
    plan = plan_of_cuts(([2, 4, 2], 4), ([4, 4], 4))
    assert routes(plan, worker(1)) == [
        "4: 0-1 n0/0, 2-3 n3/0, 4-5 n4/0, 6-7 n2/0",
        "4: 0-3 n3/0, 4-7 n4/0",
    ]


def test_a_hop_that_meets_its_own_workers_is_merged() -> None:
    """The peer that covers the hole holds what the route has next there already."""
    plan = equal_pipelines(2, 2, 4)
    once = reroute(plan, [worker(1)], generation=Generation(2))
    holds = (*once.holds, Hold(first_layer=0, last_layer=0, workers=(worker(3),)))
    shadowed = Plan(generation=Generation(2), holds=holds, routes=once.routes)
    found = routes(shadowed, worker(0), worker(2))
    assert found == ["8: 0-1 n3/0"]


def test_micro_batches_go_by_ticks() -> None:
    """The first peer is half as fast: of twelve more it gets none until the other has twice as
    much."""
    plan = equal_pipelines(3, 1, 12)
    found = reroute(
        plan,
        [worker(2)],
        generation=Generation(2),
        ticks=lambda hop: 2 if hop.workers == (worker(0),) else 1,
    )
    assert [text(route) for route in found.routes] == [
        "12: 0-0 n0/0",
        "24: 0-0 n1/0",
    ]


def test_a_layer_without_holders_is_told() -> None:
    with pytest.raises(LayerLost, match="layer 1"):
        reroute(equal_pipelines(2, 3, 1), [worker(1), worker(4)], generation=Generation(2))


def test_holders_that_cannot_follow_each_other_are_told() -> None:
    both = worker(0), worker(0, 1)
    holds = (
        Hold(first_layer=0, last_layer=0, workers=both),
        Hold(first_layer=1, last_layer=1, workers=(worker(1),)),
        Hold(first_layer=1, last_layer=1, workers=(worker(0),)),
    )
    hops = (
        Hop(first_layer=0, last_layer=0, workers=both),
        Hop(first_layer=1, last_layer=1, workers=(worker(1),)),
    )
    route = Route(hops=hops, microbatches=1)
    plan = Plan(generation=Generation(1), holds=holds, routes=(route,))
    with pytest.raises(PlanInfeasible, match=r"layers 1 to 1 .* move state instead"):
        reroute(plan, [worker(1)], generation=Generation(2))


@pytest.mark.parametrize("seed", range(100))
def test_random_losses_leave_valid_plans(seed: int) -> None:
    """Valid ones by the plan's own checks; again after each further loss."""
    rng = random.Random(seed)
    plan = before = random_pipelines(rng)
    for generation in range(2, 5):
        lost = rng.sample(plan.workers, min(rng.randint(1, 2), len(plan.workers)))
        alive = [hold for hold in plan.holds if set(lost).isdisjoint(hold.workers)]
        held = {layer for hold in alive for layer in hold.layers}
        if held != set(range(plan.layer_count)):
            with pytest.raises(LayerLost):
                reroute(plan, lost, generation=Generation(generation))
            continue
        found = reroute(plan, lost, generation=Generation(generation))
        assert found == reroute(plan, lost, generation=Generation(generation))
        assert found.microbatches == before.microbatches
        assert found.holds == tuple(alive)
        used = {w for route in found.routes for hop in route.hops for w in hop.workers}
        assert used.isdisjoint(lost)
        counts = {route.hops: route.microbatches for route in found.routes}
        assert len(counts) == len(found.routes), "the same hops are one route"
        for route in plan.routes:
            if set(lost).isdisjoint(w for hop in route.hops for w in hop.workers):
                assert counts[route.hops] >= route.microbatches
        plan = found


def test_a_way_that_ends_before_a_hole_leaves_no_work_behind() -> None:
    """The first hole has somebody, the second nobody."""
    a, b, c = worker(0), worker(1), worker(2)
    passed = (hop(0, 0, a), hop(1, 1, b), hop(2, 2, a))
    load = Counter({b: 10})
    spread = Spread({(b,): {1}, (c,): {0}}, {a}, layer_count, load)
    with pytest.raises(PlanInfeasible, match="layers 2 to 2"):
        spread.way(passed)
    assert +load == Counter({b: 10})

"""One worker takes the layers of a hole: who, by brute force, and what follows."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import pytest
from msgspec import structs

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold, Hop
from oobleck.planner.recovery import moves
from oobleck.planner.recovery.answer import Change
from oobleck.planner.recovery.moves import Move, Moves, most_load
from oobleck.planner.recovery.normalise import promising
from oobleck.planner.recovery.policies import answer
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.reroute import held_layers, layer_count, reroute, routes_around
from oobleck.planner.search.shadows import with_shadows
from support.choices import with_stage_moved as normalised
from support.profiles import profile_of

#: A pipeline: its nodes, and how many layers each has.
Cut = Sequence[tuple[str, int]]


def made(cuts: Sequence[Cut], microbatches: Sequence[int]) -> Plan:
    pipelines = []
    for cut, count in zip(cuts, microbatches, strict=True):
        ends = list(accumulate(layers for _, layers in cut))
        stages = tuple(
            Hold(first_layer=end - layers, last_layer=end - 1, workers=(worker(name),))
            for (name, layers), end in zip(cut, ends, strict=True)
        )
        nodes = tuple(NodeName(name) for name, _ in cut)
        pipelines.append(Pipeline(nodes=nodes, stages=stages, microbatches=count))
    return Plan.of_pipelines(pipelines, generation=Generation(1))


def equal(pipelines: int, stages: int, microbatches: int, layers: int = 1) -> Plan:
    """Nodes `p0s0`, `p0s1`, ..."""
    cut = [[(f"p{p}s{s}", layers) for s in range(stages)] for p in range(pipelines)]
    return made(cut, [microbatches] * pipelines)


def worker(name: str, slot: int = 0) -> WorkerId:
    return WorkerId(NodeName(name), slot)


def of_two_workers(plan: Plan) -> Plan:
    """Each stage on two workers of its node."""
    pairs = [
        replace(
            pipeline,
            stages=tuple(
                structs.replace(
                    stage, workers=(*stage.workers, structs.replace(stage.workers[0], slot=1))
                )
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    ]
    return Plan.of_pipelines(pairs, generation=plan.generation)


def after(plan: Plan, lost: str) -> Change:
    """`plan` without the nodes `lost`, re-routed, and what could follow."""
    names = lost.split()
    gone, count = {w for w in plan.workers if w.node in names}, plan.layer_count
    return Change(
        plan=reroute(plan, gone, generation=Generation(2)),
        base=plan,
        live=tuple(node for node in plan.nodes if node not in names),
        generation=Generation(3),
        templates={},
        profile=profile_of(
            [1.0] * count, gpus=(1, 2), gpus_per_node=2, state=[1] * count, activation=[1] * count
        ),
        fault_tolerance=1,
        tied=False,
    )


def by_load(asked: Change, ticks: Callable[[Hop], int]) -> list[Move]:
    """All moves."""
    return Moves(asked.base, asked.plan, ticks).by_load(enough=1000)


def test_two_losses_of_one_stage() -> None:
    """The only holder computes for three; with one of the first stage beside it each stage is
    computed by two, or three."""
    asked = after(equal(3, 4, 8), "p0s2 p1s2")
    assert most_load(asked.plan.routes, layer_count) == 24
    best = by_load(asked, layer_count)[0]
    assert best.load == 12
    assert promising(asked, asked.plan)
    found = normalised(asked)
    plan = found.found.plan
    assert (found.policy, found.found.rule, found.then) == ("normalise", "normalise", None)
    assert (found.moved_bytes, plan.microbatches) == (1, 24)
    assert plan.nodes == asked.plan.nodes
    assert (can_lose(asked.plan), can_lose(plan)) == (0, 1)
    assert "takes over layers 2-2 in place of others" in found.found.reason


def test_a_stage_moves_before_the_next_step_where_the_job_names_that() -> None:
    base = equal(3, 4, 8)

    def loss(lost: str) -> Change:
        return replace(after(base, lost), plan=base, generation=Generation(2))

    lost = loss("p0s2 p1s2")
    routed = answer(lost, "reroute")
    found = answer(lost, "normalise")
    assert (routed.then, found.policy, found.then) == ("normalise", "normalise", None)
    behind = normalised(after(base, "p0s2 p1s2"))
    assert found.found.plan.routes == behind.found.plan.routes
    assert found.found.plan.generation == lost.generation
    assert (found.moved_bytes, found.stall_s > 0) == (behind.moved_bytes, True)
    assert "p0s2, p1s2 lost" in found.found.reason
    assert "takes over layers 2-2" in found.found.reason
    # Holes at different stages leave nothing to move.
    kept = answer(loss("p0s2 p1s1"), "normalise")
    assert kept.policy == "reroute"
    assert "not by normalise: a step would take" in kept.found.reason


def test_one_hole_of_equal_stages_may_as_well_stay() -> None:
    asked = after(equal(3, 4, 8), "p0s2")
    assert not promising(asked, asked.plan)


def test_holes_at_different_stages_may_as_well_stay() -> None:
    asked = after(equal(3, 4, 8), "p0s2 p1s1")
    assert not promising(asked, asked.plan)


def test_a_hole_in_a_large_stage_goes_to_a_small_one() -> None:
    cut = [[("a", 3), ("b", 1)], [("c", 3), ("d", 1)]]
    asked = after(made(cut, [8, 8]), "a")
    found = normalised(asked)
    assert found.found.reason.startswith("b/0 takes over layers 0-2")
    assert found.found.plan.shards[worker("b")] == asked.base.shards[worker("a")]


def test_a_second_move_follows_the_first() -> None:
    """Four of five holders of a stage are lost."""
    asked = after(equal(5, 3, 6), "p0s1 p1s1 p2s1 p3s1")
    first = normalised(asked)
    assert first.then == "normalise"
    again = replace(asked, plan=first.found.plan, generation=Generation(4))
    second = normalised(again)
    assert second.then is None
    assert second.step_s < first.step_s
    held = Counter(next(iter(shards)).layer for shards in second.found.plan.shards.values())
    assert held == {0: 4, 1: 3, 2: 4}


def test_state_that_takes_long_to_move_stays() -> None:
    asked = after(equal(3, 2, 8), "p0s1 p1s1")
    large = tuple(replace(layer, state_bytes=10**15) for layer in asked.profile.layers)
    links = replace(asked.profile.links, inter_node_bytes_per_s=1e10)
    asked = replace(
        asked,
        profile=replace(asked.profile, layers=large, links=links, gpu_memory_bytes=10**17),
        fault_tolerance=0,
    )
    assert promising(asked, asked.plan)
    with pytest.raises(PlanInfeasible, match=r"after 1e\+05 s of copying"):
        normalised(asked)


def test_a_loss_does_not_wait_for_routes_behind_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of moves. Whether one is promising follows from sums."""
    plan = equal(6, 4, 8)
    for lost, then in (("p0s1 p1s2 p2s3 p3s0", None), ("p0s1 p1s1 p2s1 p3s1", "normalise")):
        asked = replace(after(plan, lost), plan=plan)
        monkeypatch.setattr(moves, "Spread", None)
        assert answer(asked, "reroute").then == then


def test_of_many_moves_those_with_the_least_bound_are_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = after(equal(6, 4, 8), "p0s1 p1s1 p2s1 p3s1 p4s0")
    every = by_load(asked, layer_count)
    assert len(every) > 5
    # The first one alone is more than that.
    monkeypatch.setattr(moves, "MOST_VISITS", 1)
    few = by_load(asked, layer_count)
    assert [move.load for move in few] == [every[0].load]


def test_moves_that_cannot_be_among_the_best_are_not_worked_out() -> None:
    asked = after(equal(6, 4, 8), "p0s1 p1s1 p2s1 p3s1 p4s0")
    every = by_load(asked, layer_count)
    best = Moves(asked.base, asked.plan, layer_count).by_load(enough=1)
    assert best[0] == every[0]
    assert len(best) < len(every)


def test_what_can_be_lost_does_not_become_less() -> None:
    """Nobody gives up what it alone holds, nor what one of two holds where one may be lost."""
    asked = after(equal(2, 2, 8), "p0s1")
    offered = Moves(asked.base, asked.plan, layer_count)
    for move in by_load(asked, layer_count):
        holds, routes = offered.behind(move.taken)
        assert held_layers(holds).keys() == {(w,) for w in asked.plan.workers}
        assert move.load == most_load(routes, layer_count)
    assert not promising(asked, asked.plan)


def test_a_move_behind_some_that_leave_less_to_lose() -> None:
    """Those with the least load leave a layer to fewer nodes than now; the best of the others is
    taken."""
    cuts = [
        [("a", 3)],
        [("b", 1), ("c", 2)],
        [("d", 1), ("e", 1), ("f", 1)],
        [("g", 1), ("h", 1), ("i", 1)],
    ]
    asked = after(made(cuts, [4, 8, 2, 2]), "h g")
    found = normalised(asked)
    assert found.found.reason.startswith("f/0 takes over layers 1-1")
    assert can_lose(found.found.plan) >= can_lose(asked.plan)


def test_a_loss_with_the_policy_by_name_says_what_follows() -> None:
    plan = equal(3, 2, 4)
    first = replace(after(plan, "p0s1"), plan=plan)
    found = answer(first, "reroute")
    assert (found.policy, found.then) == ("reroute", None)
    asked = replace(after(plan, "p0s1 p1s1"), plan=found.found.plan)
    second = answer(asked, "reroute")
    assert (second.policy, second.then) == ("reroute", "normalise")
    behind = normalised(replace(asked, plan=second.found.plan))
    assert behind.step_s < 0.75 * second.step_s


def of_two_with_shadows(pipelines: int, stages: int, tolerated: int) -> Plan:
    plan = of_two_workers(equal(pipelines, stages, 8, layers=2))
    profile = after(plan, "").profile
    found = with_shadows(plan, profile, fault_tolerance=tolerated)
    assert found.shadows
    return found


def test_who_takes_over_gives_up_its_shadows_and_its_partners() -> None:
    """A shadow is on one worker, a stage on two."""
    asked = after(of_two_with_shadows(2, 3, 2), "p0s1")
    assert promising(asked, asked.plan)
    moves = Moves(asked.base, asked.plan, layer_count).by_load(enough=1000)
    assert moves
    for move in moves:
        holds, routes = Moves(asked.base, asked.plan, layer_count).behind(move.taken)
        plan = replace(asked.plan, holds=holds, routes=routes)
        assert {plan.held[w] for w in move.taken.workers} == {tuple(move.taken.layers)}
        assert move.load == most_load(routes, layer_count)
        assert can_lose(plan) >= can_lose(asked.plan)
    found = normalised(asked).found
    assert found.plan.microbatches == 16
    assert found.reason.startswith("p0s2/0, p0s2/1 take over layers 2-3 in place of others")


def test_a_lone_shadow_is_no_stage_to_give_up() -> None:
    """Its worker computes its own stage all the same."""
    asked = after(of_two_with_shadows(2, 4, 2), "p0s1")
    stages = {hop.workers for route in asked.base.routes for hop in route.hops}
    assert len(held_layers(asked.plan.holds)) > len(stages)
    taking = {move.taken.workers for move in by_load(asked, layer_count)}
    assert taking
    assert taking <= stages


def every_load(asked: Change) -> list[int]:
    """Of all workers and all layers of lost ones, without leaving any out."""
    base, loads = asked.base, list[int]()
    lost = {w for w in base.workers if w.node not in asked.live}
    holes = [h for r in base.routes for h in r.hops if not lost.isdisjoint(h.workers)]
    for taker in asked.plan.workers:
        for hole in holes:
            if set(hole.layers) <= held_layers(asked.plan.holds)[taker,]:
                continue
            taken = Hold(first_layer=hole.first_layer, last_layer=hole.last_layer, workers=(taker,))
            holds = [*(h for h in asked.plan.holds if taker not in h.workers), taken]
            if fewest(holds, base) < fewest(asked.plan.holds, base):
                continue
            held = held_layers(holds)
            try:
                routes = routes_around(base.routes, held, lost | {taker}, ticks)
            except PlanInfeasible:
                continue
            loads.append(most_load(routes, ticks))
    return loads


def fewest(holds: Sequence[Hold], base: Plan) -> int:
    """How many nodes hold the layer that fewest hold."""
    layers = range(base.layer_count)
    return min(len({h.workers[0].node for h in holds if layer in h.layers}) for layer in layers)


def ticks(hop: Hop) -> int:
    return sum(1 + layer % 3 for layer in hop.layers)


@pytest.mark.parametrize("seed", range(40))
def test_the_least_load_is_that_of_all_moves(seed: int) -> None:
    draw = random.Random(seed)
    cuts: list[Cut] = []
    for pipeline in range(draw.randint(2, 4)):
        ends = sorted(draw.sample(range(1, 6), draw.randint(0, 3)))
        sizes = [b - a for a, b in zip([0, *ends], [*ends, 6], strict=True)]
        cuts.append([(f"p{pipeline}s{s}", size) for s, size in enumerate(sizes)])
    plan = made(cuts, [draw.randint(1, 6) for _ in cuts])
    names = draw.sample(plan.nodes, draw.randint(1, min(3, len(plan.nodes) - 1)))
    try:
        asked = after(plan, " ".join(names))
    except PlanInfeasible:
        return
    offered = Moves(asked.base, asked.plan, ticks)
    loads = every_load(asked)
    assert [move.load for move in offered.by_load(enough=1)][:1] == sorted(loads)[:1]
    # No load is below its bound.
    assert offered.may_leave(min(loads, default=0)) == bool(loads)

"""Workers hold more than they compute, in pieces, and train as the unsplit reference does."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Committed, FaultRule, PhaseReached
from oobleck.core.plan import Plan
from oobleck.core.routes import Route
from oobleck.core.schedules import Schedule
from oobleck.planner.cost.listed import with_listing
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.answer import Change, Situation
from oobleck.planner.recovery.normalise import normalised
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Rule
from oobleck.planner.recovery.uneven.candidates import candidates
from oobleck.planner.recovery.worth import shadowed
from oobleck.planner.search.shadows import with_shadows
from support import foreign
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.rerouted import (
    held,
    moved_bytes,
    profile_of,
    rerouted,
    wait_lost,
    with_holds,
    workers_of,
)
from support.routes import random_routes
from support.unsplit import check, make_job
from support.waiting import is_stopped

#: Layers 0 to 2 and 3 to 5, twice.
FOUR = make_plan(1, [[("a", 3), ("b", 3)], [("c", 3), ("d", 3)]], [6, 4])
#: `e` computes nothing, and has a copy of what `d` holds; `a` has one of the last layer.
SHADOWED = with_holds(FOUR, held(3, 5, "e"), held(5, 5, "a"))


def killed(node: str, point: str, **when: Any) -> FaultRule:
    return FaultRule(worker=worker_named(node), point=point, action="kill_worker", **when)


def stopped(node: str, **when: Any) -> FaultRule:
    """A rule that stops a worker until it is let go, so that no step overtakes a plan's push."""
    return FaultRule(worker=worker_named(node), point="before:Forward", action="stop", **when)


def without(plan: Plan, name: str, instead: str) -> Plan:
    """`instead` computes what the worker of `name` did, in the next generation."""
    lost, found = (worker_named(name),), (worker_named(instead),)
    return Plan(
        generation=plan.generation + 1,
        holds=tuple(hold for hold in plan.holds if hold.workers != lost),
        routes=tuple(
            Route(
                hops=tuple(
                    structs.replace(hop, workers=found) if hop.workers == lost else hop
                    for hop in route.hops
                ),
                microbatches=route.microbatches,
            )
            for route in plan.routes
        ),
        schedule=plan.schedule,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_copies_that_nobody_computes_with_are_kept_the_same(
    warm: WarmWorkers, tmp_path: Path, schedule: str
) -> None:
    job = make_job(tmp_path / "out")
    plan = dataclasses.replace(SHADOWED, schedule=schedule)
    with Director(warm, job) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(plan)
        cluster.wait_finished(plan)
        told = {
            worker: [said.compute for said in cluster.said(worker, Committed)]
            for worker in plan.workers
        }
        assert set(told.pop(worker_named("e"))) == {None}, "it computes nothing"
        assert all(each and each.makes_sense for own in told.values() for each in own)
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize(("lost", "point"), [("d", "voting"), ("e", "before:SyncGradient")])
def test_a_copy_that_computes_nothing_takes_over_or_is_lost(
    warm: WarmWorkers, tmp_path: Path, lost: str, point: str
) -> None:
    job = make_job(tmp_path / "out")
    after = without(SHADOWED, "d", "e") if lost == "d" else rerouted(SHADOWED, job, "e")
    with Director(warm, job, [killed(lost, point, step=2)]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(SHADOWED)
        wait_lost(cluster, SHADOWED, lost)
        cluster.assign(after)
        cluster.wait_finished(after)
        assert moved_bytes(cluster, after) == {0}
        cluster.stop()
        check(cluster, job)


def test_a_copy_that_has_not_seen_the_vote_rolls_forward_and_takes_over(
    warm: WarmWorkers, tmp_path: Path
) -> None:
    job = make_job(tmp_path / "out")
    behind = FaultRule(worker=worker_named("e"), point="voting", step=2, action="hold")
    after = without(SHADOWED, "d", "e")
    with Director(warm, job, [behind]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(SHADOWED)
        cluster.wait(lambda: len(cluster.records.get(2, ())) == 4, "the step of all but e")
        cluster.kill("d")
        wait_lost(cluster, SHADOWED, "d")
        cluster.assign(after)
        cluster.wait_finished(after)
        forward = {str(w) for w in after.workers if arrival(cluster, w, after).rolled_forward}
        assert forward == {"e/0"}
        assert moved_bytes(cluster, after) == {0}
        cluster.stop()
        check(cluster, job)


def arrival(cluster: Director, worker: WorkerId, plan: Plan) -> PhaseReached:
    """What a worker told of where it stood as it came to `plan`."""
    told = cluster.said(worker, PhaseReached, plan.generation)
    (found,) = (m for m in told if isinstance(m, PhaseReached) and m.phase == "joined")
    return found


#: Of two nodes the other one has the whole model after a loss.
PAIR: Sequence[tuple[str, int]] = [("a", 3), ("b", 3)]
#: Of three, two go on: with one hop each, or `a` with the first and the last one.
TRIO: Sequence[tuple[str, int]] = [("a", 2), ("b", 2), ("c", 2)]


@pytest.mark.parametrize(
    ("nodes", "lost", "point", "schedule"),
    [
        (TRIO, "c", "before:LoadTokens", "1f1b"),
        pytest.param(TRIO, "b", "before:ReceiveActivation", "1f1b", marks=pytest.mark.soak),
        pytest.param(TRIO, "c", "before:Forward", "1f1b", marks=pytest.mark.soak),
        (PAIR, "a", "after:SendActivation", "1f1b"),
        pytest.param(TRIO, "a", "after:ReceiveGradient", "1f1b", marks=pytest.mark.soak),
        pytest.param(PAIR, "a", "before:Backward", "1f1b", marks=pytest.mark.soak),
        (TRIO, "c", "before:BackwardInput", "zb-h1"),
        pytest.param(TRIO, "b", "before:BackwardWeight", "zb-h1", marks=pytest.mark.soak),
        pytest.param(PAIR, "b", "before:SendGradient", "1f1b", marks=pytest.mark.soak),
        pytest.param(TRIO, "a", "before:SyncGradient", "zb-h1", marks=pytest.mark.soak),
        (TRIO, "c", "reduced", "1f1b"),
        (TRIO, "b", "voting", "zb-h1"),
        pytest.param(PAIR, "b", "before:OptimizerStep", "1f1b", marks=pytest.mark.soak),
    ],
)
def test_the_last_one_with_layers_but_a_shadow_is_lost(
    warm: WarmWorkers,
    tmp_path: Path,
    nodes: Sequence[tuple[str, int]],
    lost: str,
    point: str,
    schedule: Schedule,
) -> None:
    """In a lone pipeline, at every kind of instruction; its shadow runs both parts."""
    job = make_job(tmp_path / "out")
    bare = make_plan(1, [nodes], [10], schedule=schedule)
    plan = with_shadows(bare, profile_of(job), fault_tolerance=1)
    assert can_lose(plan) == 1
    assert all(len(plan.owners(layer)) == 2 for layer in range(plan.layer_count))
    after = rerouted(plan, job, lost)
    with Director(warm, job, [killed(lost, point, step=2)]) as cluster:
        cluster.start(*plan.nodes)
        cluster.assign(plan)
        wait_lost(cluster, plan, lost)
        cluster.assign(after)
        cluster.wait_finished(after)
        assert moved_bytes(cluster, after) == {0}
        cluster.stop()
        check(cluster, job)


# ---- around lost workers


#: Three pipelines that cut the model differently.
SEVEN = make_plan(
    1, [[("a", 2), ("b", 2), ("c", 2)], [("d", 3), ("e", 3)], [("f", 4), ("g", 2)]], [4, 3, 3]
)
#: The same with layers that two workers of a node share, in each pipeline.
SHARED = make_plan(
    1, [[("a", 3, 2), ("b", 3)], [("c", 3), ("d", 3, 2)], [("e", 2, 2), ("f", 4)]], [4, 3, 3]
)


def hugging_face(kind: str, blocks: str, **config: object) -> ModelSpec:
    """A model of theirs with four blocks."""
    return foreign.spec(kind, sequence_length=16, vocab_size=256, **{blocks: 4}, **config)


#: GPT in fp64, tied, is what nothing else is said of.
UNTIED: dict[str, Any] = {"tied": False, "precision": "fp32"}
LLAMA: dict[str, Any] = {"model": hugging_face("llama", "num_hidden_layers", num_key_value_heads=2)}
RTOL = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2}


@pytest.mark.parametrize(
    ("first", "second", "point", "given"),
    [
        # Of a worker that helps, at every kind of instruction.
        pytest.param(
            "before:ReceiveActivation", "d", "before:LoadTokens", {}, marks=pytest.mark.soak
        ),
        ("after:SendActivation", "e", "before:ReceiveActivation", {}),
        pytest.param("before:Forward", "d", "before:Forward", UNTIED, marks=pytest.mark.soak),
        pytest.param("before:Backward", "d", "before:SendActivation", {}, marks=pytest.mark.soak),
        pytest.param("reduced", "d", "after:ReceiveGradient", {}, marks=pytest.mark.soak),
        pytest.param("voting", "d", "before:Backward", {}, marks=pytest.mark.soak),
        ("after:ReceiveGradient", "e", "before:BackwardInput", LLAMA),
        ("before:SendGradient", "e", "before:BackwardWeight", UNTIED),
        pytest.param("before:SyncGradient", "e", "before:SendGradient", {}, marks=pytest.mark.soak),
        pytest.param(
            "before:OptimizerStep", "d", "before:SyncGradient", LLAMA, marks=pytest.mark.soak
        ),
        pytest.param("before:Backward", "e", "reduced", UNTIED, marks=pytest.mark.soak),
        pytest.param("before:Forward", "d", "voting", {}, marks=pytest.mark.soak),
        pytest.param("reduced", "e", "before:OptimizerStep", {}, marks=pytest.mark.soak),
        # Of one whose work stays what it was.
        ("before:Forward", "a", "before:SendActivation", {}),
        pytest.param("voting", "g", "before:Backward", UNTIED, marks=pytest.mark.soak),
        # Of a node with a layer that two of its workers share.
        ("before:Backward", "d", "before:BackwardWeight", {"microbatch": 2, "global_batch": 20}),
    ],
)
def test_a_second_loss_in_a_re_routed_plan(
    warm: WarmWorkers, tmp_path: Path, first: str, second: str, point: str, given: dict[str, Any]
) -> None:
    """At a step after the first one's, which struck at any point as well."""
    job = make_job(tmp_path / "out", **{"steps": 5, **given})
    whole = SHARED if job.training.microbatch > 1 else SEVEN
    once = rerouted(whole, job, "b")
    twice = rerouted(once, job, second)
    # Step 3 may have been begun before the first loss was known.
    faults = [killed("b", first, step=2), killed(second, point, step=4)]
    with Director(warm, job, faults) as cluster:
        cluster.start(*map(str, whole.workers))
        cluster.assign(whole)
        wait_lost(cluster, whole, "b")
        cluster.assign(once)
        wait_lost(cluster, once, second)
        cluster.assign(twice)
        cluster.wait_finished(twice)
        assert moved_bytes(cluster, once) | moved_bytes(cluster, twice) == {0}
        cluster.stop()
        check(cluster, job, rtol=RTOL[job.training.precision])


@pytest.mark.parametrize("helpers", [0, 1])
def test_few_help_and_others_take_whole_micro_batches(
    warm: WarmWorkers, tmp_path: Path, helpers: int
) -> None:
    """With no helper, the rest of the hit pipeline computes nothing until a worker is lost whose
    layers it has."""
    job = make_job(tmp_path / "out", steps=6)
    once = rerouted(SEVEN, job, "b", helpers=helpers)
    assert bool(listed_routes(once)) == bool(helpers)
    assert ("a" in {worker.node for worker in once.shadows}) == (not helpers)
    twice = rerouted(once, job, "d")
    faults = [killed("b", "before:Backward", step=2), killed("d", "before:Forward", step=4)]
    with Director(warm, job, faults) as cluster:
        cluster.start(*SEVEN.nodes)
        cluster.assign(SEVEN)
        wait_lost(cluster, SEVEN, "b")
        cluster.assign(once)
        wait_lost(cluster, once, "d")
        cluster.assign(twice)
        cluster.wait_finished(twice)
        assert moved_bytes(cluster, once) | moved_bytes(cluster, twice) == {0}
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize(
    ("earlier", "points"),
    [
        ((), {"b": "before:Backward", "d": "after:ReceiveGradient"}),
        ((), {"c": "voting", "e": "voting"}),
        # In a plan that is re-routed: one that helps, and one that does not.
        (("b",), {"a": "before:Forward", "e": "before:BackwardInput"}),
    ],
)
def test_two_nodes_are_lost_at_once(
    warm: WarmWorkers, tmp_path: Path, earlier: Sequence[str], points: dict[str, str]
) -> None:
    """Both stand at these points when they are killed, after the loss of `earlier` ones."""
    job = make_job(tmp_path / "out", steps=5)
    faults = [killed(name, "before:Forward", step=2) for name in earlier]
    for name, point in points.items():
        faults.append(FaultRule(worker=worker_named(name), point=point, step=4, action="stop"))
    plan = SEVEN
    with Director(warm, job, faults) as cluster:
        cluster.start(*SEVEN.nodes)
        cluster.assign(SEVEN)
        for name in earlier:
            wait_lost(cluster, plan, name)
            plan = rerouted(plan, job, name)
            cluster.assign(plan)
        cluster.wait(lambda: all(map(cluster.has_faulted, points)), "both stopped")
        for name in points:
            cluster.kill(name)
        wait_lost(cluster, plan, *points)
        plan = rerouted(plan, job, *points)
        cluster.assign(plan)
        cluster.wait_finished(plan)
        assert moved_bytes(cluster, plan) == {0}
        cluster.stop()
        check(cluster, job)


def test_back_to_templates_at_a_step_boundary(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job(tmp_path / "out", steps=8)
    second = rerouted(SEVEN, job, "b")
    third = make_plan(
        3, [[("a", 2), ("c", 4)], [("d", 3), ("e", 3)], [("f", 4), ("g", 2)]], [4, 3, 3]
    )
    faults = [
        killed("b", "before:Backward", step=2),
        stopped("a", generation=Generation(2), step=4),
    ]
    with Director(warm, job, faults) as cluster:
        cluster.start(*"abcdefg")
        cluster.assign(SEVEN)
        wait_lost(cluster, SEVEN, "b")
        cluster.assign(second)
        cluster.wait(lambda: 2 in cluster.records, "a step of the re-routed plan")
        cluster.assign(third, boundary=True)
        cluster.let_go("a")
        cluster.wait_finished(third)
        cluster.stop()
        check(cluster, job)


def test_behind_two_losses_of_a_stage_a_worker_takes_it_over(
    warm: WarmWorkers, tmp_path: Path
) -> None:
    """And goes on with other layers than it had, which it drops; then it is lost too."""
    job = make_job(tmp_path / "out", steps=16)
    first = make_plan(
        1, [[("a", 3), ("b", 3)], [("c", 3), ("d", 3)], [("e", 3), ("f", 3)]], [4, 3, 3]
    )
    second = rerouted(first, job, "b")
    third = rerouted(second, job, "d")
    fourth = normalised(
        Change(
            plan=third,
            base=first,
            live=third.nodes,
            generation=Generation(4),
            templates={},
            profile=profile_of(job),
            fault_tolerance=1,
            tied=job.model.tied,
        )
    )[0].found.plan
    (taker,) = (w for w in fourth.workers if fourth.shards[w] != third.shards[w])
    assert fourth.shards[taker] == first.shards[worker_named("b")]
    fifth = rerouted(fourth, job, taker.node)
    faults = [
        killed("b", "before:Forward", step=2),
        killed("d", "before:Forward", step=3),
        stopped("a", generation=Generation(3), step=5),
        killed(taker.node, "before:Forward", generation=Generation(4)),
    ]
    with Director(warm, job, faults) as cluster:
        cluster.start(*"abcdef")
        cluster.assign(first)
        for lost, plan, after in (("b", first, second), ("d", second, third)):
            wait_lost(cluster, plan, lost)
            cluster.assign(after)
        cluster.wait(lambda: 3 in cluster.records, "a step of the re-routed plan")
        cluster.assign(fourth, boundary=True)
        cluster.let_go("a")
        wait_lost(cluster, fourth, taker.node)
        cluster.assign(fifth)
        cluster.wait_finished(fifth)
        assert max(moved_bytes(cluster, fourth)) > 0
        assert moved_bytes(cluster, fifth) == {0}
        cluster.stop()
        check(cluster, job)


def test_behind_a_re_routed_plan_others_get_copies_and_take_over(
    warm: WarmWorkers, tmp_path: Path
) -> None:
    """Of what only one worker has left, while its order of compute stays; then it is lost too."""
    job = make_job(tmp_path / "out", steps=16)
    second = rerouted(FOUR, job, "b")
    third = shadowed(
        Change(
            plan=second,
            base=FOUR,
            live=second.nodes,
            generation=Generation(3),
            templates={},
            profile=profile_of(job),
            fault_tolerance=1,
            tied=job.model.tied,
            shadows=True,
        )
    ).found.plan
    assert (can_lose(second), can_lose(third)) == (0, 1)
    assert (third.routes, third.listing) == (second.routes, second.listing)
    fourth = rerouted(third, job, "d")
    faults = [
        killed("b", "before:Forward", step=2),
        stopped("a", generation=Generation(2), step=4),
        killed("d", "before:Forward", generation=Generation(3)),
    ]
    with Director(warm, job, faults) as cluster:
        cluster.start(*"abcd")
        cluster.assign(FOUR)
        cluster.wait(lambda: cluster.workers[worker_named("b")].gone, "the scripted kill")
        cluster.assign(second)
        cluster.wait(lambda: 2 in cluster.records, "a step of the re-routed plan")
        cluster.assign(third, boundary=True)
        cluster.let_go("a")
        cluster.wait(lambda: cluster.workers[worker_named("d")].gone, "the second kill")
        cluster.assign(fourth)
        cluster.wait_finished(fourth)
        assert max(moved_bytes(cluster, third)) > 0
        assert moved_bytes(cluster, fourth) == {0}
        cluster.stop()
        check(cluster, job)


# ---- around slow workers


def candidate(rule: Rule, running: Plan, job: JobSpec, rates: dict[str, float]) -> Plan:
    """For these rates, in the next generation."""
    now = Situation(
        running=running,
        base=SEVEN,
        rates={worker_named(name): rate for name, rate in rates.items()},
        profile=profile_of(job),
        tied=job.model.tied,
    )
    (found,) = (each.plan for each in candidates(now) if each.rule == rule)
    return dataclasses.replace(found, generation=Generation(running.generation + 1))


def test_stragglers_come_and_go(warm: WarmWorkers, tmp_path: Path) -> None:
    """At step boundaries: around two of them, other cuts, and back."""
    job = make_job(tmp_path / "out", steps=24)
    second = candidate("partial reroute", SEVEN, job, {"b": 0.25, "d": 0.5})
    third = candidate("recut", second, job, {"b": 0.25})
    fourth = dataclasses.replace(SEVEN, generation=Generation(4))
    assert listed_routes(second)
    assert second.shards == SEVEN.shards != third.shards
    faults = [stopped("a", generation=Generation(number)) for number in (1, 2, 3)]
    with Director(warm, job, faults) as cluster:
        cluster.start(*"abcdefg")
        cluster.assign(SEVEN)
        slow = cluster.workers[worker_named("a")]
        for after in (second, third, fourth):
            cluster.wait(lambda: is_stopped(slow.pid), "a stopped")
            cluster.assign(after, boundary=True)
            cluster.let_go("a")
        cluster.wait_finished(fourth)
        assert moved_bytes(cluster, second) == {0}
        assert max(moved_bytes(cluster, third)) > 0
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize(
    ("rule", "victim", "point"),
    [
        # Nobody receives anything for it.
        ("partial reroute", "b", "preparing"),
        ("partial reroute", "d", "prepared"),
        # Layer 3 goes from `b` and `e` to `c` and `g`.
        ("recut", "e", "feeding"),
        pytest.param("recut", "g", "prepared", marks=pytest.mark.soak),
        pytest.param("recut", "c", "before:take over", marks=pytest.mark.soak),
        ("recut", "b", "before:take over"),
        ("recut", "a", "before:connect"),
    ],
)
def test_a_loss_on_the_way_into_a_plan_around_a_straggler(
    warm: WarmWorkers, tmp_path: Path, rule: Rule, victim: str, point: str
) -> None:
    """The master goes on from the plan that was coming, whoever has entered it."""
    job = make_job(tmp_path / "out", steps=12)
    second = candidate(rule, SEVEN, job, {"b": 0.25})
    third = rerouted(second, job, victim)
    hold = FaultRule(worker=worker_named("a"), point="before:LoadTokens", step=3, action="stop")
    fault = killed(victim, point, generation=second.generation)
    with Director(warm, job, [hold, fault]) as cluster:
        cluster.start(*SEVEN.nodes)
        cluster.assign(SEVEN)
        cluster.wait(lambda: cluster.has_faulted("a"), "step 3")
        cluster.assign(second, boundary=True)
        cluster.let_go("a")
        wait_lost(cluster, second, victim)
        cluster.assign(third)
        cluster.wait_finished(third)
        cluster.stop()
        check(cluster, job)


# ---- any routes


def random_plan(draw: random.Random, job: JobSpec) -> Plan:
    """Every layer is on two nodes."""
    while True:
        plan = random_routes(
            draw,
            layers=job.model.layer_count,
            names="abcde",
            microbatches=job.training.microbatches,
        )
        if can_lose(plan) > 0 and listed_routes(plan):
            return with_listing(plan, profile_of(job), split=draw.random() < 0.5)


@pytest.mark.parametrize(
    ("seed", "given"),
    [
        pytest.param(1, {}, marks=pytest.mark.soak),
        pytest.param(2, {"global_batch": 16}, marks=pytest.mark.soak),
        (3, {"recompute": "layer"}),
        pytest.param(4, {"clip": 0.1}, marks=pytest.mark.soak),
        pytest.param(5, {"precision": "fp32"}, marks=pytest.mark.soak),
        (6, {"precision": "bf16", "recompute": "layer"}),
        pytest.param(7, {"model": hugging_face("gpt2", "n_layer")}, marks=pytest.mark.soak),
        (8, LLAMA),
    ],
)
def test_any_routes_train_and_lose_a_node(
    warm: WarmWorkers, tmp_path: Path, seed: int, given: dict[str, Any]
) -> None:
    """One after the other all its workers are killed, and others compute for them."""
    draw = random.Random(seed)
    job = make_job(tmp_path / "out", tied=draw.random() < 0.5, **{"microbatch": 2, **given})
    plan = random_plan(draw, job)
    lost = draw.choice(draw.choice(draw.choice(plan.routes).hops).workers)
    kind = draw.choice(["before:Forward", "after:Forward", "before:SyncGradient", "voting"])
    faults = [killed(str(w), kind, step=2) for w in workers_of(plan, lost.node)]
    after = rerouted(plan, job, lost.node)
    with Director(warm, job, faults) as cluster:
        cluster.start(*map(str, plan.workers))
        cluster.assign(plan)
        wait_lost(cluster, plan, lost.node)
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        check(cluster, job, rtol=RTOL[job.training.precision])

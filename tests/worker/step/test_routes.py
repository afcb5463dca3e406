"""Workers hold more than they compute, in pieces, and train as the unsplit reference does."""

import dataclasses
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from oobleck.host.ipc.messages import FaultRule, PhaseReached
from oobleck.planner.cost.listed import with_listing
from oobleck.planner.ids import Generation
from oobleck.planner.job.spec import JobSpec, ModelSpec
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hold, Route
from oobleck.planner.recovery.answer import Change
from oobleck.planner.recovery.normalise import normalised
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.reroute import reroute
from oobleck.planner.recovery.rules import Rule
from oobleck.planner.recovery.uneven.candidates import Situation, candidates
from oobleck.planner.search.shadows import with_shadows
from support import foreign
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.routes import random_routes
from support.unsplit import check, make_job

#: Layers 0 to 2 and 3 to 5, twice.
FOUR = make_plan(1, [[("a", 3), ("b", 3)], [("c", 3), ("d", 3)]], [6, 4])


def held(first: int, last: int, *names: str) -> Hold:
    workers = tuple(map(worker_named, names))
    return Hold(first_layer=first, last_layer=last, workers=workers)


def with_holds(plan: Plan, *more: Hold) -> Plan:
    return dataclasses.replace(plan, holds=(*plan.holds, *more))


#: `e` computes nothing, and has a copy of what `d` holds; `a` has one of the last layer.
SHADOWED = with_holds(FOUR, held(3, 5, "e"), held(5, 5, "a"))


def without(plan: Plan, name: str, instead: str) -> Plan:
    """`instead` computes what the worker of `name` did, in the next generation."""
    lost, found = (worker_named(name),), (worker_named(instead),)
    return Plan(
        generation=plan.generation + 1,
        holds=tuple(hold for hold in plan.holds if hold.workers != lost),
        routes=tuple(
            Route(
                hops=tuple(
                    dataclasses.replace(hop, workers=found) if hop.workers == lost else hop
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
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize("point", ["before:Backward", "voting", "before:OptimizerStep"])
def test_a_copy_takes_over_at_once_and_nothing_moves(
    warm: WarmWorkers, tmp_path: Path, point: str
) -> None:
    job = make_job(tmp_path / "out")
    lost = worker_named("d")
    fault = FaultRule(worker=lost, point=point, step=2, action="kill_worker")
    after = without(SHADOWED, "d", "e")
    with Director(warm, job, [fault]) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(SHADOWED)
        cluster.wait(lambda: cluster.workers[lost].gone, "the scripted kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        assert moved_bytes(cluster, after) == {0}
        cluster.stop()
        check(cluster, job)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_lone_pipeline_loses_a_node_and_its_shadow_runs_both_parts_as_one(
    warm: WarmWorkers, tmp_path: Path, lost: str
) -> None:
    """Of two, the other one has the whole model then; of three, what is left has two hops."""
    job = make_job(tmp_path / "out")
    names = {"a": [("a", 3), ("b", 3)], "b": [("a", 2), ("b", 2), ("c", 2)]}[lost]
    plan = with_shadows(make_plan(1, [names], [10]), profile_of(job), fault_tolerance=1)
    assert can_lose(plan) == 1
    after = rerouted(plan, job, lost)
    fault = FaultRule(
        worker=worker_named(lost), point="before:Backward", step=2, action="kill_worker"
    )
    with Director(warm, job, [fault]) as cluster:
        cluster.start(*(name for name, _ in names))
        cluster.assign(plan)
        cluster.wait(lambda: cluster.workers[worker_named(lost)].gone, "the scripted kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        assert moved_bytes(cluster, after) == {0}
        cluster.stop()
        check(cluster, job)


# ---- around lost workers


def profile_of(job: JobSpec) -> Profile:
    """As a master that has not measured has it."""
    return estimate_profile(job, gpus_per_node=2, memory_per_worker_bytes=1 << 30)


def rerouted(plan: Plan, job: JobSpec, *names: str) -> Plan:
    """Without these workers, in the next generation."""
    lost = {worker_named(name) for name in names}
    around = reroute(plan, lost, generation=Generation(plan.generation + 1))
    return with_listing(around, profile_of(job)) if listed_routes(around) else around


#: Three pipelines that cut the model differently.
SEVEN = make_plan(
    1, [[("a", 2), ("b", 2), ("c", 2)], [("d", 3), ("e", 3)], [("f", 4), ("g", 2)]], [4, 3, 3]
)
#: Layers on two workers in two of three pipelines; of their nodes one worker each is left over.
SHARED = make_plan(
    1, [[("a", 3, 2), ("b", 3)], [("c", 3), ("d", 3, 2)], [("e", 2, 2), ("f", 4)]], [4, 3, 3]
)


@pytest.mark.parametrize(
    ("point", "tied"),
    [
        ("before:Forward", True),
        ("after:SendActivation", False),
        ("before:Backward", True),
        ("reduced", True),
        ("voting", False),
    ],
)
def test_the_micro_batches_of_a_lost_worker_go_to_others(
    warm: WarmWorkers, tmp_path: Path, point: str, tied: bool
) -> None:
    job = make_job(tmp_path / "out", tied=tied)
    lost = worker_named("b")
    fault = FaultRule(worker=lost, point=point, step=2, action="kill_worker")
    after = rerouted(SEVEN, job, "b")
    with Director(warm, job, [fault]) as cluster:
        cluster.start(*"abcdefg")
        cluster.assign(SEVEN)
        cluster.wait(lambda: cluster.workers[lost].gone, "the scripted kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        assert moved_bytes(cluster, after) == {0}
        cluster.stop()
        check(cluster, job)


def moved_bytes(cluster: Director, plan: Plan) -> set[int]:
    return {
        said.received_bytes
        for worker in plan.workers
        for said in cluster.said(worker, PhaseReached, plan.generation)
        if said.phase == "transferred"
    }


@pytest.mark.parametrize(
    ("helper", "point"),
    [
        ("d", "before:LoadTokens"),
        ("e", "before:ReceiveActivation"),
        ("d", "before:Forward"),
        ("d", "before:SendActivation"),
        ("d", "after:ReceiveGradient"),
        ("e", "before:BackwardInput"),
        ("e", "before:BackwardWeight"),
        ("e", "before:SendGradient"),
        ("d", "before:SyncGradient"),
        ("e", "reduced"),
        ("d", "voting"),
        ("e", "before:OptimizerStep"),
    ],
)
def test_a_second_loss_in_a_re_routed_plan(
    warm: WarmWorkers, tmp_path: Path, helper: str, point: str
) -> None:
    """Of a worker that helps, at a step after the first one's, at every kind of instruction."""
    job = make_job(tmp_path / "out")
    faults = [
        FaultRule(worker=worker_named("b"), point="before:Forward", step=2, action="kill_worker"),
        FaultRule(worker=worker_named(helper), point=point, step=3, action="kill_worker"),
    ]
    second = rerouted(SEVEN, job, "b")
    third = rerouted(second, job, helper)
    with Director(warm, job, faults) as cluster:
        cluster.start(*"abcdefg")
        cluster.assign(SEVEN)
        for lost, after in (("b", second), (helper, third)):
            gone = worker_named(lost)
            cluster.wait(lambda gone=gone: cluster.workers[gone].gone, "the scripted kill")
            cluster.assign(after)
        cluster.wait_finished(third)
        assert moved_bytes(cluster, second) | moved_bytes(cluster, third) == {0}
        cluster.stop()
        check(cluster, job)


def test_back_to_templates_at_a_step_boundary(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job(tmp_path / "out", steps=8)
    second = rerouted(SEVEN, job, "b")
    third = make_plan(
        3, [[("a", 2), ("c", 4)], [("d", 3), ("e", 3)], [("f", 4), ("g", 2)]], [4, 3, 3]
    )
    fault = FaultRule(
        worker=worker_named("b"), point="before:Backward", step=2, action="kill_worker"
    )
    with Director(warm, job, [fault]) as cluster:
        cluster.start(*"abcdefg")
        cluster.assign(SEVEN)
        gone = worker_named("b")
        cluster.wait(lambda: cluster.workers[gone].gone, "the scripted kill")
        cluster.assign(second)
        cluster.wait(lambda: 2 in cluster.records, "a step of the re-routed plan")
        cluster.assign(third, boundary=True)
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
    ).found.plan
    (taker,) = (w for w in fourth.workers if fourth.shards[w] != third.shards[w])
    assert fourth.shards[taker] == first.shards[worker_named("b")]
    fifth = rerouted(fourth, job, taker.node)
    faults = [
        FaultRule(worker=worker, point="before:Forward", action="kill_worker", **when)
        for worker, when in (
            (worker_named("b"), {"step": 2}),
            (worker_named("d"), {"step": 3}),
            (taker, {"generation": Generation(4)}),
        )
    ]
    with Director(warm, job, faults) as cluster:
        cluster.start(*"abcdef")
        cluster.assign(first)

        def lose(name: str, after: Plan) -> None:
            gone = worker_named(name)
            cluster.wait(lambda: cluster.workers[gone].gone, "the scripted kill")
            cluster.assign(after)

        lose("b", second)
        lose("d", third)
        cluster.wait(lambda: 3 in cluster.records, "a step of the re-routed plan")
        cluster.assign(fourth, boundary=True)
        lose(taker.node, fifth)
        cluster.wait_finished(fifth)
        assert max(moved_bytes(cluster, fourth)) > 0
        assert moved_bytes(cluster, fifth) == {0}
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


def has_stepped(cluster: Director, generation: int) -> bool:
    return any(r.generation == generation for told in cluster.records.values() for r in told)


def test_stragglers_come_and_go(warm: WarmWorkers, tmp_path: Path) -> None:
    """At step boundaries: around two of them, other cuts, and back."""
    job = make_job(tmp_path / "out", steps=24)
    second = candidate("partial reroute", SEVEN, job, {"b": 0.25, "d": 0.5})
    third = candidate("recut", second, job, {"b": 0.25})
    fourth = dataclasses.replace(SEVEN, generation=Generation(4))
    assert listed_routes(second)
    assert second.shards == SEVEN.shards != third.shards
    with Director(warm, job) as cluster:
        cluster.start(*"abcdefg")
        cluster.assign(SEVEN)
        for number, after in enumerate((second, third, fourth), 1):
            cluster.wait(lambda n=number: has_stepped(cluster, n), f"generation {number}")
            cluster.assign(after, boundary=True)
        cluster.wait_finished(fourth)
        assert moved_bytes(cluster, second) == {0}
        assert max(moved_bytes(cluster, third)) > 0
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


def hugging_face(kind: str, blocks: str, **config: object) -> ModelSpec:
    """A model of theirs with four blocks."""
    return foreign.spec(kind, sequence_length=16, vocab_size=256, **{blocks: 4}, **config)


@pytest.mark.parametrize(
    ("seed", "given"),
    [
        (1, {}),
        (2, {"global_batch": 16}),
        (3, {"recompute": "layer"}),
        (4, {"clip": 0.1}),
        (5, {"precision": "fp32"}),
        (6, {"precision": "bf16", "recompute": "layer"}),
        (7, {"model": hugging_face("gpt2", "n_layer")}),
        (8, {"model": hugging_face("llama", "num_hidden_layers", num_key_value_heads=2)}),
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
    mates = [worker for worker in plan.workers if worker.node == lost.node]
    faults = [FaultRule(worker=w, point=kind, step=2, action="kill_worker") for w in mates]
    after = rerouted(plan, job, *map(str, mates))
    with Director(warm, job, faults) as cluster:
        cluster.start(*map(str, plan.workers))
        cluster.assign(plan)
        cluster.wait(lambda: any(cluster.workers[w].gone for w in mates), "a scripted kill")
        for worker in mates:
            with suppress(ProcessLookupError):  # its own fault has just killed it
                if not cluster.workers[worker].gone:
                    cluster.kill(str(worker))
        cluster.wait(lambda: all(cluster.workers[w].gone for w in mates), "all of the node")
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        rtol = {"fp64": 1e-12, "fp32": 1e-6, "bf16": 2e-2}[job.training.precision]
        check(cluster, job, rtol=rtol)

"""The planner's functions as the master asks them: templates at hand, and what is lost."""

from dataclasses import replace

import msgspec
import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.profile import LayerProfile, Links, Profile
from oobleck.master.planning import client, solve
from oobleck.master.rules.next_plan import next_plan
from oobleck.master.state.job import Job
from oobleck.planner.search import catalogue
from oobleck.planner.search.templates import shortlisted_templates
from oobleck.proto.types import NodeStatus, WorkerStatus
from support.trained import JOB, context, node, trained_job


def test_templates_outlive_the_weakest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[range] = []

    def generate(profile, sizes):
        made.append(sizes)
        return shortlisted_templates(profile, sizes)

    monkeypatch.setattr(catalogue, "shortlisted_templates", generate)
    solve.forget()  # other tests may have asked the same
    nodes = [node(1, memory=1 << 29), *(node(number) for number in range(2, 7))]
    state, job = trained_job(nodes, hidden=34)
    assert made, "the first plan needs templates"
    made.clear()
    change = next_plan(context(state), job, nodes[1:], Generation(2)).found
    assert change.plan.nodes == ("n2", "n3", "n4", "n5", "n6")
    weak = [*nodes[1:], node(7, memory=1 << 29)]
    state.nodes[weak[-1].facts.node] = weak[-1]
    assert len(next_plan(context(state), job, weak, Generation(2)).found.plan.nodes) == 6
    assert made == []


def test_a_layer_that_nobody_holds_is_a_cause() -> None:
    nodes = [node(number) for number in range(1, 5)]
    state, job = trained_job(nodes, hidden=36)
    assert job.current.made is not None
    first, second = job.current.made.plan.pipelines
    live = [one for one in nodes if one.facts.node not in (first.nodes[0], second.nodes[0])]
    with pytest.raises(PlanInfeasible, match="no live worker holds the state of layer 0"):
        next_plan(context(state), job, live, Generation(2))
    job.seen.steps.committed_step = 0
    for one in nodes:  # before the first step, layers are made anew
        worker = one.seen.status.workers[0]
        fresh = WorkerStatus(
            slot=0, incarnation=worker.incarnation, pid=2, generation=worker.generation
        )
        one.seen = replace(
            one.seen,
            status=NodeStatus(job_id=JOB, generation=Generation(1), workers=(fresh,)),
        )
    assert len(next_plan(context(state), job, live, Generation(2)).found.plan.nodes) == 2


def test_every_plan_has_the_schedule_that_suits_it() -> None:
    nodes = [node(number) for number in range(6)]
    state, job = trained_job(nodes, hidden=512)
    assert job.current.made is not None
    plan = job.current.made.plan
    after = next_plan(context(state), job, nodes[1:], Generation(2)).found.plan
    for one in (plan, after):
        deepest = max(len(pipeline.stages) for pipeline in one.pipelines)
        assert deepest > 1
        assert one.schedule == "zb-h1", "few micro-batches: bubbles are long, and memory plenty"


def test_a_schedule_that_the_job_wants_stays() -> None:
    nodes = [node(number) for number in range(6)]
    state, job = trained_job(nodes, hidden=512, schedule="gpipe")
    assert job.current.made is not None
    assert job.current.made.plan.schedule == "gpipe"
    assert next_plan(context(state), job, nodes[1:], Generation(2)).found.plan.schedule == "gpipe"


def test_nodes_with_more_slots_than_the_model_has_layers() -> None:
    nodes = [node(number, slots=16) for number in range(1, 4)]
    state, job = trained_job(nodes, hidden=40, min_nodes=1, microbatch=1)
    assert job.current.made is not None
    plan = job.current.made.plan
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [8, 8, 8]
    assert client.idle_slots(plan, 16) == (
        "8 of 16 worker slots per node stay idle: the model's 8 layers make no pipeline that uses "
        "more than 8"
    )
    assert client.idle_slots(plan, 8) == ""
    change = next_plan(context(state), job, nodes[1:], Generation(2)).found
    assert change.plan.nodes == ("n2", "n3")
    nodes[0].desired = msgspec.structs.replace(
        nodes[0].desired, job_id=JOB, generation=Generation(1)
    )
    counted_on = state.assignment(nodes[0]).worker_incarnations
    assert counted_on == tuple(f"n1/{slot}" for slot in range(8))


def test_workers_share_stages_where_the_model_has_fewer_layers() -> None:
    _, job = trained_job([node(number, slots=16) for number in range(1, 4)], hidden=48, min_nodes=1)
    assert job.current.made is not None
    assert client.idle_slots(job.current.made.plan, 16) == ""
    for pipeline in job.current.made.plan.pipelines:
        assert [len(stage.workers) for stage in pipeline.stages] == [2] * 8
        assert all(stage.resident for stage in pipeline.stages)


def test_slots_idle_where_a_pipeline_is_to_have_more_nodes() -> None:
    _, job = trained_job([node(number, slots=8) for number in range(1, 5)], hidden=42, microbatch=1)
    assert job.current.made is not None
    assert [len(p.nodes) for p in job.current.made.plan.pipelines] == [2, 2]
    assert client.idle_slots(job.current.made.plan, 8).startswith("4 of 8 worker slots per node")


def test_stages_have_several_workers_where_that_is_faster() -> None:
    layer = LayerProfile(
        name="",
        forward_s={1: 1.0, 2: 0.1},
        backward_s={1: 2.0, 2: 0.2},
        update_s={1: 0.1, 2: 0.1},
        parameter_bytes=10,
        state_bytes=40,
        activation_bytes=10,
        output_bytes=10,
    )
    profile = Profile(
        microbatch=2,
        gpus_per_node=2,
        gpu_memory_bytes=1 << 20,
        layers=tuple(replace(layer, name=f"layer{number}") for number in range(8)),
        links=Links(intra_node_bytes_per_s=1e9, inter_node_bytes_per_s=1e9, latency_s=1e-5),
    )
    nodes = [node(number, slots=2) for number in range(1, 5)]
    _, job = trained_job(nodes, hidden=44, profile=profile)
    assert job.current.made is not None
    for pipeline in job.current.made.plan.pipelines:
        assert [len(stage.workers) for stage in pipeline.stages] == [2, 2]
        assert all(stage.resident for stage in pipeline.stages)


def test_a_model_beyond_all_machines_is_a_cause() -> None:
    spec = JobSpec(
        name="planning",
        model=ModelSpec(layers=512, hidden=1 << 18, heads=1 << 10, sequence_length=1 << 22),
        data=DataSpec(text=("/nowhere/*.py",)),
        training=TrainingSpec(steps=100, global_batch=2, microbatch=1),
        fault_tolerance=1,
    )
    job = Job(id=JOB, request_id="", spec=spec, submitted_at=0.0)
    with pytest.raises(PlanInfeasible, match=r"profile: layer block0: .* is not a time"):
        client.check_enough(job, [node(1), node(2)])


def test_what_cannot_be_is_said_again_from_memory() -> None:
    nodes = [node(number) for number in range(1, 5)]
    state, job = trained_job(nodes, hidden=46)
    for _ in range(2):
        with pytest.raises(PlanInfeasible, match="needs at least 2 nodes") as caught:
            next_plan(context(state), job, nodes[:1], Generation(2))
        assert caught.value.__cause__ is caught.value.__context__ is None

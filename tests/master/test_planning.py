"""The planner's functions as the master asks them: templates at hand, and what is lost."""

from dataclasses import replace
from typing import Literal

import pytest

from oobleck.host.messages import Rendezvous
from oobleck.master import planning
from oobleck.master.events import PlanMade
from oobleck.master.state import ClusterState, Job, Node, NodeSeen
from oobleck.planner import catalogue
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName
from oobleck.planner.job import DataSpec, JobSpec, ModelSpec, ResourceSpec, TrainingSpec
from oobleck.planner.templates import generate_templates
from oobleck.proto.types import NodeFacts, NodeStatus, WorkerStatus

JOB = JobId("planning-1")


def node(number: int, memory: int = 1 << 30) -> Node:
    name = NodeName(f"n{number}")
    facts = NodeFacts(
        node=name,
        incarnation=Incarnation(f"{number:04x}"),
        hostname=name,
        address="10.0.0.1",
        pid=1,
        worker_slots=1,
        device="cpu",
        memory_per_worker_bytes=memory,
    )
    worker = WorkerStatus(
        slot=0,
        incarnation=Incarnation(f"{name}/0"),
        pid=2,
        generation=Generation(1),
        committed_step=5,
    )
    status = NodeStatus(job_id=JOB, generation=Generation(1), workers=(worker,))
    return Node(facts=facts, seen=NodeSeen(last_heard=0.0, session=1, status=status))


def trained_job(
    nodes: list[Node], hidden: int, schedule: Literal["auto", "gpipe"] = "auto"
) -> tuple[ClusterState, Job]:
    """A job that has committed steps in its first plan, on all of the nodes."""
    spec = JobSpec(
        name="planning",
        model=ModelSpec(layers=6, hidden=hidden, heads=2, sequence_length=16),
        data=DataSpec(text=("/nowhere/*.py",)),
        training=TrainingSpec(steps=100, global_batch=16, microbatch=2, pipeline_schedule=schedule),
        fault_tolerance=1,
        resources=ResourceSpec(min_nodes_per_pipeline=2),
    )
    job = Job(id=JOB, request_id="", spec=spec, submitted_at=0.0, most_nodes=len(nodes))
    plan = planning.first_plan(job, nodes, Generation(1))
    job.plans[Generation(1)] = plan
    job.made = PlanMade(
        job_id=JOB,
        plan=plan,
        rendezvous=Rendezvous(store="", prefix=""),
        boundary=False,
        incarnations=tuple(Incarnation(str(worker)) for worker in plan.workers),
        cause="start",
        rule="start",
        reason="",
        nodes_lost=(),
        workers_lost=(),
        nodes_joined=(),
        can_lose=planning.can_lose(plan),
        worker_slots=1,
        detect_s=0.0,
    )
    state = ClusterState(nodes={one.facts.node: one for one in nodes}, jobs={JOB: job})
    return state, job


def test_templates_outlive_the_weakest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[range] = []

    def generate(profile, sizes):
        made.append(sizes)
        return generate_templates(profile, sizes)

    monkeypatch.setattr(catalogue, "generate_templates", generate)
    nodes = [node(1, memory=1 << 29), *(node(number) for number in range(2, 7))]
    state, job = trained_job(nodes, hidden=34)
    assert made, "the first plan needs templates"
    made.clear()
    change = planning.next_plan(state, job, nodes[1:], Generation(2))
    assert change.plan.nodes == ("n2", "n3", "n4", "n5", "n6")
    weak = [*nodes[1:], node(7, memory=1 << 29)]
    state.nodes[weak[-1].facts.node] = weak[-1]
    assert len(planning.next_plan(state, job, weak, Generation(2)).plan.nodes) == 6
    assert made == []


def test_a_layer_that_nobody_holds_is_a_cause() -> None:
    nodes = [node(number) for number in range(1, 5)]
    state, job = trained_job(nodes, hidden=36)
    assert job.made is not None
    first, second = job.made.plan.pipelines
    live = [one for one in nodes if one.facts.node not in (first.nodes[0], second.nodes[0])]
    with pytest.raises(PlanInfeasible, match="no live worker holds the state of layer 0"):
        planning.next_plan(state, job, live, Generation(2))
    job.seen.committed_step = 0
    for one in nodes:  # before the first step, layers are made anew
        worker = one.seen.status.workers[0]
        fresh = WorkerStatus(
            slot=0, incarnation=worker.incarnation, pid=2, generation=worker.generation
        )
        one.seen = replace(
            one.seen,
            status=NodeStatus(job_id=JOB, generation=Generation(1), workers=(fresh,)),
        )
    assert len(planning.next_plan(state, job, live, Generation(2)).plan.nodes) == 2


def test_every_plan_has_the_schedule_that_suits_it() -> None:
    nodes = [node(number) for number in range(6)]
    state, job = trained_job(nodes, hidden=512)
    assert job.made is not None
    plan = job.made.plan
    after = planning.next_plan(state, job, nodes[1:], Generation(2)).plan
    for one in (plan, after):
        deepest = max(len(pipeline.stages) for pipeline in one.pipelines)
        assert deepest > 1
        assert one.schedule == "zb-h1", "few micro-batches: bubbles are long, and memory plenty"


def test_a_schedule_that_the_job_wants_stays() -> None:
    nodes = [node(number) for number in range(6)]
    state, job = trained_job(nodes, hidden=512, schedule="gpipe")
    assert job.made is not None
    assert job.made.plan.schedule == "gpipe"
    assert planning.next_plan(state, job, nodes[1:], Generation(2)).plan.schedule == "gpipe"

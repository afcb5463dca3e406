"""A job that has committed steps in its first plan, as the master knows it."""

from typing import Literal

from oobleck.host.detection import Detection
from oobleck.host.ipc.messages import Rendezvous
from oobleck.master.events.jobs import ProfileChosen
from oobleck.master.events.plans import PlanMade
from oobleck.master.planning import client
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules.decision import Context
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node, NodeSeen
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName
from oobleck.planner.job.spec import DataSpec, JobSpec, ModelSpec, ResourceSpec, TrainingSpec
from oobleck.planner.profile.profile import Profile
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.proto.types import NodeFacts, NodeStatus, WorkerStatus

JOB = JobId("planning-1")


def context(state: ClusterState | None = None) -> Context:
    return Context(
        state=state or ClusterState(), now=0.0, timing=Detection(), nonce="", planner=AtOnce()
    )


def node(number: int, memory: int = 1 << 30, slots: int = 1) -> Node:
    name = NodeName(f"n{number}")
    facts = NodeFacts(
        node=name,
        incarnation=Incarnation(f"{number:04x}"),
        hostname=name,
        address="10.0.0.1",
        pid=1,
        worker_slots=slots,
        device="cpu",
        memory_per_worker_bytes=memory,
    )
    workers = tuple(
        WorkerStatus(
            slot=slot,
            incarnation=Incarnation(f"{name}/{slot}"),
            pid=2,
            generation=Generation(1),
            committed_step=5,
        )
        for slot in range(slots)
    )
    status = NodeStatus(job_id=JOB, generation=Generation(1), workers=workers)
    return Node(facts=facts, seen=NodeSeen(last_heard=0.0, session=1, status=status))


def trained_job(
    nodes: list[Node],
    hidden: int,
    schedule: Literal["auto", "gpipe"] = "auto",
    *,
    min_nodes: int = 2,
    microbatch: int = 2,
    profile: Profile | None = None,
) -> tuple[ClusterState, Job]:
    """A job that has committed steps in its first plan, on all of the nodes."""
    spec = JobSpec(
        name="planning",
        model=ModelSpec(layers=6, hidden=hidden, heads=2, sequence_length=16),
        data=DataSpec(text=("/nowhere/*.py",)),
        training=TrainingSpec(
            steps=100, global_batch=16, microbatch=microbatch, pipeline_schedule=schedule
        ),
        fault_tolerance=1,
        resources=ResourceSpec(min_nodes_per_pipeline=min_nodes),
    )
    job = Job(id=JOB, request_id="", spec=spec, submitted_at=0.0)
    job.lineage.most_nodes = len(nodes)
    if profile is not None:
        job.profiling.chosen = ProfileChosen(
            job_id=JOB, source="file", profile=profile, key="", reason=""
        )
    plan = client.first_plan(AtOnce(), job, nodes, Generation(1))
    job.lineage.plans[Generation(1)] = plan
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
        can_lose=can_lose(plan),
        worker_slots=nodes[0].facts.worker_slots,
        detect_s=0.0,
    )
    state = ClusterState(nodes={one.facts.node: one for one in nodes}, jobs={JOB: job})
    return state, job

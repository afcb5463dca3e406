"""State of a master with a job that trains in its first plan, on nodes that are all ready."""

from collections.abc import Sequence

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Rendezvous
from oobleck.core.profile import Profile
from oobleck.host.versions import ENGINE
from oobleck.master.events.jobs import PlanMade, ProfileChosen
from oobleck.master.planning import client
from oobleck.master.planning.solve import AtOnce
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node, NodeSeen
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.proto.types import NodeFacts, NodeStatus, WorkerStatus


def ready_node(name: str, job_id: JobId, *, memory: int, slots: int) -> Node:
    """Return a node whose workers have committed step 5 of the job's first generation."""
    facts = NodeFacts(
        node=NodeName(name),
        incarnation=Incarnation(name.strip("n").zfill(4)),
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
    status = NodeStatus(job_id=job_id, generation=Generation(1), workers=workers)
    return Node(facts=facts, seen=NodeSeen(last_heard=0.0, session=1, status=status))


def planned_job(
    job_id: JobId, spec: JobSpec, nodes: Sequence[Node], profile: Profile | None = None
) -> tuple[ClusterState, Job]:
    """Return the state of a master, and its job in its first plan on all nodes. `profile`: None:
    the estimate."""
    job = Job(id=job_id, request_id="", spec=spec, submitted_at=0.0)
    job.lineage.most_nodes = len(nodes)
    if profile is not None:
        job.profiling.chosen = ProfileChosen(
            job_id=job_id, source="file", profile=profile, key="", reason=""
        )
    plan = client.first_plan(AtOnce(), job, list(nodes), Generation(1))
    job.lineage.plans[Generation(1)] = plan
    job.current.made = PlanMade(
        job_id=job_id,
        plan=plan,
        rendezvous=Rendezvous(host="", prefix=""),
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
        engine=ENGINE,
    )
    return ClusterState(nodes={one.facts.node: one for one in nodes}, jobs={job_id: job}), job

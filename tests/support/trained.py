"""A job that has committed steps in its first plan, as the master knows it."""

from typing import Literal

from bench.support.trained import planned_job, ready_node
from oobleck.core.ids import JobId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, ResourceSpec, TrainingSpec
from oobleck.core.profile import Profile
from oobleck.host.detection import Detection
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules.decision import Context
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

JOB = JobId("planning-1")


def context(state: ClusterState | None = None) -> Context:
    return Context(
        state=state or ClusterState(), now=0.0, timing=Detection(), nonce="", planner=AtOnce()
    )


def node(number: int, memory: int = 1 << 30, slots: int = 1) -> Node:
    return ready_node(f"n{number}", JOB, memory=memory, slots=slots)


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
    return planned_job(JOB, spec, nodes, profile)

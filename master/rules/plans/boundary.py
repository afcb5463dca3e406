"""Condition for plans that nothing waits for: they come at a step boundary."""

from oobleck.master.rules.nodes import draining
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job


def undisturbed(state: ClusterState, job: Job) -> bool:
    """Return whether the job trains with steps left, and no node is lost, away or being moved."""
    return (
        job.state == "running"
        and not job.seen.peers_lost
        and job.seen.steps.furthest_step < job.spec.training.steps
        and not draining.on_the_move(state, job)
        and all(state.nodes[name].connected for name in job.current.members)
    )

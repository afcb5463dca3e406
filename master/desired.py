"""What is desired of every node, as it follows from the jobs and the nodes.

The only writer of `Node.desired`. Must not know how it gets to the agents.
"""

from dataclasses import replace

from oobleck.master import cordon
from oobleck.master.node import Node
from oobleck.master.state import ClusterState


def set_desired(state: ClusterState, now: float, unix: float) -> None:
    """Bring every node's desired state in line with its job; a change gets a new version.

    Versions follow the calendar, so that they grow even where a journal was lost.
    """
    job = state.job
    chosen = {node.facts.node for node in state.candidates(job)} if job else set()
    members = {*job.members, *job.leaving} if job else set()
    chosen |= {name for name in members if cordon.moves_off(state.nodes[name])}
    for name, node in state.nodes.items():
        job_id = job.id if job and name in chosen else None
        generation = job.generation if job and job_id and name in members else None
        attempt = 0
        if job and job_id and generation is None and job.measuring is not None:
            attempt = job.measuring.wish.attempt
        waits = job is not None and job.save_answered < job.save_request
        save = job.save_request if job and waits and generation is not None else 0
        desired = replace(
            node.desired,
            job_id=job_id,
            generation=generation,
            attempt=attempt,
            save=save,
            drained=node.drain is not None and node.drain.done,
        )
        if desired != node.desired:
            if desired.job_id != node.desired.job_id:
                node.seen.ready_at = None
            node.desired = replace(desired, version=next_version(node, unix))
        if job_id is None:
            node.seen.assigned_at = None
        elif node.seen.assigned_at is None:
            node.seen.assigned_at = now


def next_version(node: Node, unix: float) -> int:
    return max(node.desired.version + 1, int(unix * 1000))

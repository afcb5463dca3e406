"""How events of nodes change the state: who is part of the cluster, and what a job loses with them.

What keeps a node out of new plans though nothing is wrong with it is
`oobleck.master.state.drains`'s.
"""

from oobleck.master.events.nodes import (
    NodeCleared,
    NodeDrained,
    NodeDrainRequested,
    NodeEvent,
    NodeForgotten,
    NodeKept,
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeReleased,
    NodeReset,
    NodeUndrained,
    WorkerLost,
)
from oobleck.master.state import drains, evidence
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.job_states import lose
from oobleck.master.state.node import Node, NodeSeen
from oobleck.planner.ids import NodeName


def apply(state: ClusterState, event: NodeEvent, now: float, unix: float) -> None:
    match event:
        case NodeRegistered():
            _register(state, event, now)
        case NodeCleared():
            state.nodes[event.node].stale_workers = False
        case NodeLost():
            _lose_node(state, event, now, unix)
        case WorkerLost():
            if not event.late:
                what = f"{event.worker}: {event.reason}"
                drains.note_failure(state.nodes[event.worker.node], what, unix)
            lose(state.jobs[event.job_id], event, now, detect_s=event.detect_s)
        case NodeLeftOut():
            _leave_out(state.jobs[event.job_id], event, now)
        case NodeReset():
            _reset(state.nodes[event.node], state.jobs[event.job_id], event, now)
        case NodeDrained():
            drains.apply(state, event, now, unix)
            if event.job_id is not None:
                lose(state.jobs[event.job_id], event, now)
                _note_emptied(state, event.node)
        case (
            NodeDrainRequested() | NodeKept() | NodeUndrained() | NodeQuarantined() | NodeReleased()
        ):
            drains.apply(state, event, now, unix)
        case NodeForgotten():
            del state.nodes[event.node]
            for job in state.jobs.values():
                drains.forgive(job, event.node)


def restarted(node: Node, now: float, unix: float) -> None:
    """Another master process goes on, and knows nothing but what is journaled."""
    node.seen = NodeSeen(last_heard=now, awaited=True)
    if not node.registered:
        node.seen.lost_at = now - max(0.0, unix - node.lost_at)
        node.seen.heard_at = now - max(0.0, unix - (node.heard_at or node.lost_at))
    drains.restarted(node, now, unix)


def _register(state: ClusterState, event: NodeRegistered, now: float) -> None:
    name = event.facts.node
    node = Node(facts=event.facts, stale_workers=event.stale_workers, seen=NodeSeen(last_heard=now))
    known = state.nodes.get(name)
    if state.job is not None:
        drains.forgive(state.job, name)
    anew = known is not None and known.facts.incarnation != event.facts.incarnation
    if anew or event.stale_workers:
        _note_emptied(state, name)
    if known is not None:
        node.desired = known.desired
        node.drain = drains.kept_by(known, event.facts)
        node.failures = known.failures
        node.seen.release_at = known.seen.release_at
        if known.facts.incarnation == event.facts.incarnation and state.job is not None:
            _take_back_loss(state.job, event)
    state.nodes[name] = node


def _note_emptied(state: ClusterState, name: NodeName) -> None:
    """Workers end with their agent."""
    if state.job is not None:
        state.job.lineage.emptied.add(name)


def _take_back_loss(job: Job, event: NodeRegistered) -> None:
    """The same agent is back before any plan was made without it."""
    job.losses = tuple(
        loss
        for loss in job.losses
        if not (isinstance(loss, NodeLost) and loss.node == event.facts.node)
    )
    if not job.losses:
        job.seen.loss = None


def _lose_node(state: ClusterState, event: NodeLost, now: float, unix: float) -> None:
    node = state.nodes[event.node]
    if event.cause == "left":
        _note_emptied(state, event.node)
    else:
        drains.note_failure(node, event.reason, unix)
    node.registered = False
    node.reason = event.reason
    node.lost_at, node.seen.lost_at = unix, now
    node.heard_at = unix - event.detect_s
    node.stale_workers = False
    node.seen.session = None
    job = state.job
    if job is not None and (job.has_member(event.node) or event.node in job.leaving):
        lose(job, event, now, detect_s=event.detect_s)


def _leave_out(job: Job, event: NodeLeftOut, now: float) -> None:
    if job.has_member(event.node):
        lose(job, event, now)
    else:
        evidence.forget_node(job, event.node)
    job.left_out[event.node] = event.reason
    if (
        event.node in job.seen.faults.stillborn
        and job.trained
        and event.node in job.trained.plan.nodes
    ):
        job.seen.since_step.given_up[event.node] = event.reason
    job.seen.faults.unfit.pop(event.node, None)
    job.seen.faults.stillborn.pop(event.node, None)


def _reset(node: Node, job: Job, event: NodeReset, now: float) -> None:
    """Give its work to the others, and it comes back as any node that was given up does."""
    lose(job, event, now, detect_s=event.detect_s)
    job.seen.since_step.stalls += 1
    node.stale_workers |= not event.keeps_workers

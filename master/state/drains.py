"""What keeps a node out of new plans though nothing is wrong with it: how such events are applied.

A drained node stays connected and idle until an operator undrains it, over restarts of its agent
and of the master. A drain that is the agent's own wish, because it was told to end, ends with it.
Must not know when work can move off a node: `oobleck.master.rules.draining` decides that.
"""

from dataclasses import replace

from oobleck.master.events.nodes import (
    NodeDrained,
    NodeDrainRequested,
    NodeKept,
    NodeQuarantined,
    NodeReleased,
    NodeUndrained,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Drain, Failures, Node
from oobleck.planner.ids import NodeName
from oobleck.proto.types import NodeFacts

#: Failures within this time of each other count together.
WINDOW_S = 600.0
#: A quarantine so long after the last one is the first one again.
FORGET_S = 3600.0

CordonEvent = (
    NodeDrainRequested | NodeKept | NodeDrained | NodeUndrained | NodeQuarantined | NodeReleased
)


def apply(state: ClusterState, event: CordonEvent, now: float, unix: float) -> None:
    node = state.nodes[event.node]
    match event:
        case NodeDrainRequested():
            _note_request(state, event.request_id)
            node.drain = _wished(node.drain, event)
        case NodeKept() if node.drain is not None:
            save = max(node.drain.save, event.save)
            node.drain = replace(node.drain, kept=event.reason, save=save)
        case NodeDrained() if node.drain is not None:
            node.drain = replace(node.drain, kept="", done=True)
        case NodeQuarantined() if node.drain is None:
            _quarantine(node, event, now, unix)
        case NodeReleased() if is_quarantined(node):
            node.drain = None
        case NodeUndrained():
            node.failures = Failures()
            _note_request(state, event.request_id)
            node.drain = None
            if state.job is not None:
                forgive(state.job, event.node)
        case _:
            pass  # it was undrained in the same turn


def forgive(job: Job, node: NodeName) -> None:
    """What the job holds against the node counts no more."""
    job.left_out.pop(node, None)
    job.seen.faults.unfit.pop(node, None)
    job.seen.faults.stillborn.pop(node, None)
    job.seen.faults.ailing.pop(node, None)
    job.seen.since_step.deaths = {
        w: ends for w, ends in job.seen.since_step.deaths.items() if w.node != node
    }


def _quarantine(node: Node, event: NodeQuarantined, now: float, unix: float) -> None:
    before, until = node.failures, unix + event.seconds
    again = unix <= before.quarantined_until + FORGET_S
    node.drain = Drain(
        by="quarantine",
        reason=event.reason,
        force=False,
        until=until,
        until_ready=event.until_ready,
    )
    node.failures = Failures(
        quarantines=before.quarantines + 1 if again else 1, quarantined_until=until
    )
    node.seen.release_at = now + event.seconds


def restarted(node: Node, now: float, unix: float) -> None:
    """Another master process goes on: a quarantine ends when it would have ended."""
    if node.drain is not None and node.drain.by == "quarantine":
        node.seen.release_at = now + max(0.0, node.drain.until - unix)


def note_failure(node: Node, what: str, unix: float) -> None:
    recent = (at for at in node.failures.times if at > unix - WINDOW_S)
    node.failures = replace(node.failures, times=(*recent, unix), last=what)


def is_quarantined(node: Node) -> bool:
    return node.drain is not None and node.drain.by == "quarantine"


def _note_request(state: ClusterState, request_id: str) -> None:
    if request_id:
        state.node_requests.append(request_id)


def _wished(before: Drain | None, event: NodeDrainRequested) -> Drain:
    """An agent's wish does not make an operator's one end with the agent."""
    by_agent = not event.request_id
    if before is None or before.by == "quarantine":
        return Drain(by="agent" if by_agent else "operator", reason=event.reason, force=event.force)
    force = before.force or event.force
    if by_agent:
        return replace(before, force=force)
    return replace(before, by="operator", reason=event.reason or before.reason, force=force)


def kept_by(known: Node, facts: NodeFacts) -> Drain | None:
    """What of the node's drain counts for the agent that registers now."""
    drain = known.drain
    if drain is None or drain.by != "agent" or known.facts.incarnation == facts.incarnation:
        return drain
    return None


def moves_off(node: Node) -> bool:
    """Whether the node goes on with its part of a plan until that has moved off it."""
    drain = node.drain
    return drain is not None and not drain.done and node.registered and not node.stale_workers

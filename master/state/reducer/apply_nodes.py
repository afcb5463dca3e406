"""Application of events of nodes: membership in the cluster, losses of jobs, and exclusions of
healthy nodes from plans.

A drained node stays connected and idle until an operator undrains it, over restarts of its agent
and of the master. An agent's own drain, because it was ordered to end, ends with the agent. Must
not know when work can move off a node: `oobleck.master.rules.draining` decides that.
"""

from dataclasses import replace
from typing import Literal

from oobleck.core.ids import NodeName
from oobleck.master.events import nodes
from oobleck.master.state import evidence
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.job_states import lose
from oobleck.master.state.node import WINDOW_S, Drain, Failures, Held, Node, NodeSeen
from oobleck.proto.types import NodeFacts

#: Seconds after a quarantine from which on the next one counts as the first.
FORGET_S = 3600.0


def apply(state: ClusterState, event: nodes.NodeEvent, now: float, unix: float) -> None:
    match event:
        case nodes.NodeRegistered():
            _register(state, event, now)
        case nodes.NodeHeld():
            state.nodes[event.node].held = Held(
                job_id=event.job_id, since=unix, queued=event.queued
            )
        case nodes.NodeCleared():
            node = state.nodes[event.node]
            node.stale_workers, node.held = False, None
        case nodes.NodeLost():
            _lose_node(state, event, now, unix)
        case nodes.WorkerLost():
            if not event.late:
                what = f"{event.worker}: {event.reason}"
                _note_failure(state.nodes[event.worker.node], what, unix)
            lose(state.jobs[event.job_id], event, now, detect_s=event.detect_s)
        case nodes.NodeLeftOut():
            _leave_out(state.jobs[event.job_id], event, now)
        case nodes.NodeReset():
            _reset(state.nodes[event.node], state.jobs[event.job_id], event, now)
        case nodes.NodeDrained():
            _drain(state, event, now, unix)
            if event.job_id is not None:
                lose(state.jobs[event.job_id], event, now)
                _note_emptied(state, event.node)
        case nodes.NodeForgotten():
            _note_request(state, event.request_id)
            del state.nodes[event.node]
            for job in state.jobs.values():
                _forgive(job, event.node)
        case _:
            _drain(state, event, now, unix)


def end_unknown(state: ClusterState, event: nodes.UnknownJobEnded) -> None:
    """Mark the workers of an unknown job as stale, so that they end."""
    for name in event.nodes:
        node = state.nodes[name]
        if node.held is not None and node.held.job_id == event.job_id:
            node.held, node.stale_workers = None, node.registered


def restarted(node: Node, now: float, unix: float) -> None:
    """Reset observations of the node, since a new master process knows only the journal."""
    node.seen = NodeSeen(last_heard=now, awaited=True)
    if not node.registered:
        node.seen.lost_at = now - max(0.0, unix - node.lost_at)
        node.seen.heard_at = now - max(0.0, unix - (node.heard_at or node.lost_at))
    if node.drain is not None and node.is_quarantined:
        node.seen.release_at = now + max(0.0, node.drain.until - unix)


def _register(state: ClusterState, event: nodes.NodeRegistered, now: float) -> None:
    name = event.facts.node
    node = Node(facts=event.facts, stale_workers=event.stale_workers, seen=NodeSeen(last_heard=now))
    known = state.nodes.get(name)
    if state.job is not None:
        _forgive(state.job, name)
    anew = known is not None and known.facts.incarnation != event.facts.incarnation
    if anew or event.stale_workers:
        _note_emptied(state, name)
    if known is not None:
        node.desired = known.desired
        node.drain = _kept_by(known, event.facts)
        node.failures = known.failures
        node.seen.release_at = known.seen.release_at
        if not anew:
            node.excused = known.excused
        if not anew and state.job is not None:
            _take_back_loss(state.job, event)
    state.nodes[name] = node


def _note_emptied(state: ClusterState, name: NodeName) -> None:
    """Note that the node's workers are gone, since they end with their agent."""
    if state.job is not None:
        state.job.lineage.emptied.add(name)


def _take_back_loss(job: Job, event: nodes.NodeRegistered) -> None:
    """Take back the node's loss: the same agent has returned before any plan was made without
    it."""
    job.current.losses = tuple(
        loss
        for loss in job.current.losses
        if not (isinstance(loss, nodes.NodeLost) and loss.node == event.facts.node)
    )
    if not job.current.losses:
        job.seen.loss = None


def _lose_node(state: ClusterState, event: nodes.NodeLost, now: float, unix: float) -> None:
    node = state.nodes[event.node]
    if event.cause == "left":
        _note_emptied(state, event.node)
        node.held = None
    else:
        _note_failure(node, event.reason, unix)
    put_away = node.drain is not None and node.drain.by == "operator" and node.drain.done
    node.registered, node.left = False, put_away or event.cause == "left"
    node.reason = event.reason
    node.lost_at, node.seen.lost_at = unix, now
    node.heard_at = unix - event.detect_s
    node.stale_workers = False
    node.seen.session = None
    job = state.job
    if job is not None and (
        job.current.has_member(event.node) or event.node in job.current.leaving
    ):
        lose(job, event, now, detect_s=event.detect_s)


def _leave_out(job: Job, event: nodes.NodeLeftOut, now: float) -> None:
    if job.current.has_member(event.node):
        lose(job, event, now)
    else:
        evidence.forget_node(job, event.node)
    job.left_out[event.node] = event.reason
    if (
        event.node in job.seen.faults.stillborn
        and job.current.trained
        and event.node in job.current.trained.plan.nodes
    ):
        job.seen.since_step.given_up[event.node] = event.reason
    job.seen.faults.unfit.pop(event.node, None)
    job.seen.faults.stillborn.pop(event.node, None)


def _reset(node: Node, job: Job, event: nodes.NodeReset, now: float) -> None:
    """Remove the node from the plan; it returns as any lost node does."""
    lose(job, event, now, detect_s=event.detect_s)
    job.seen.since_step.stalls += 1
    node.stale_workers |= not event.keeps_workers


def _drain(state: ClusterState, event: nodes.DrainEvent, now: float, unix: float) -> None:
    node = state.nodes[event.node]
    match event:
        case nodes.NodeDrainRequested():
            _note_request(state, event.request_id)
            node.drain = _wished(node.drain, event)
        case nodes.NodeKept() if node.drain is not None:
            save = max(node.drain.save, event.save)
            node.drain = replace(node.drain, kept=event.reason, save=save)
        case nodes.NodeDrained() if node.drain is not None:
            node.drain = replace(node.drain, kept="", done=True)
        case nodes.NodeQuarantined() if node.drain is None:
            _quarantine(node, event, now, unix)
        case nodes.NodeReleased() if node.is_quarantined or node.is_out_as_sick:
            node.drain = None
        case nodes.NodeUndrained():
            node.failures = Failures()
            node.excused |= {*event.excused}
            _note_request(state, event.request_id)
            node.drain = None
            if state.job is not None:
                _forgive(state.job, event.node)
        case _:
            pass  # undrained in the same iteration


def _forgive(job: Job, node: NodeName) -> None:
    """Clear all failures of the node from the job."""
    job.left_out.pop(node, None)
    job.seen.faults.unfit.pop(node, None)
    job.seen.faults.stillborn.pop(node, None)
    job.seen.faults.ailing.pop(node, None)
    job.seen.faults.accused.pop(node, None)
    del job.seen.untrue[node]
    job.seen.since_step.deaths = {
        w: ends for w, ends in job.seen.since_step.deaths.items() if w.node != node
    }


def _quarantine(node: Node, event: nodes.NodeQuarantined, now: float, unix: float) -> None:
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


def _note_failure(node: Node, what: str, unix: float) -> None:
    recent = (at for at in node.failures.times if at > unix - WINDOW_S)
    node.failures = replace(node.failures, times=(*recent, unix), last=what)


def _note_request(state: ClusterState, request_id: str) -> None:
    if request_id:
        state.node_requests.append(request_id)


def _wished(before: Drain | None, event: nodes.NodeDrainRequested) -> Drain:
    """Return the drain after a request. An operator's drain stays the operator's if the agent
    requests one too."""
    by_agent = not event.request_id
    if before is None or before.by == "quarantine" or (before.by == "sickness" and event.force):
        by: Literal["operator", "agent", "sickness"] = "agent" if event.force else "sickness"
        by = by if by_agent else "operator"
        return Drain(by=by, reason=event.reason, force=event.force)
    force = before.force or event.force
    if by_agent:
        return replace(before, force=force)
    return replace(before, by="operator", reason=event.reason or before.reason, force=force)


def _kept_by(known: Node, facts: NodeFacts) -> Drain | None:
    """Return the node's drain if it applies to the agent that registers now; else None."""
    drain = known.drain
    if (
        drain is None
        or drain.by not in ("agent", "sickness")
        or known.facts.incarnation == facts.incarnation
    ):
        return drain
    return None

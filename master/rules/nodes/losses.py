"""Loss of nodes: which are lost, on what evidence, and when they are forgotten.

A node is lost when its agent's stream is closed and, close in time, another node's worker reports a
lost peer (two witnesses). On the way into a generation workers have no connections that could tell
of a death: there the other witness is that all others wait at the rendezvous. A node is also lost
when nothing is heard of it for a lease.

A master whose loop was late has extended all leases by as much (`Tick`). It also gives every node
the time to come back that agents of a restarted master have, so its own pauses convict no node.
While more than half of a plan's nodes are cut off, the master itself is taken to be cut off, and
only leases count. Many streams that end at once were cut together, and come back together. Where
all nodes fall silent together, the head has lost its network. Those nodes, too, have the time of a
master's restart. Reconnecting takes longer where many come back, since each handshake needs a
processor. Then each has an answer's time after the last one that came.

Nodes that were lost long ago are forgotten. Otherwise the state of a cluster whose machines come
and go under other names would grow for ever. Pure.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Literal

from oobleck.core.ids import NodeName
from oobleck.host.detection import Detection
from oobleck.master.events.nodes import NodeCleared, NodeForgotten, NodeLost
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.node import Node

#: Of a heartbeat: so long all others have waited at a rendezvous when who is away is missed.
_MISSED_AFTER = 0.5
#: So many streams that end within the witness window are cut together.
_MANY = 8
#: Of heartbeats: a node that was silent for longer before its stream's end fell silent, and others
#: have just come to their own end. Nodes last heard of within as long fell silent together.
_SILENT = 2
#: Who is waited for has at most so many times the time to return, however many come back.
_MOST_RETURNS = 3


def lose_nodes(context: Context) -> Decision:
    state, now, timing = context.state, context.now, context.timing
    lost, ends = list[NodeLost](), list[float]()
    leases, cut_off = _Leases(state, now, timing), _cut_off(state)
    for _, node in sorted(state.nodes.items()):
        if not node.registered:
            continue
        end, lease = leases.of(node)
        proof = None if cut_off else _proof(state, node, now, timing)
        if proof is not None:
            at, reason = proof
            lost.append(_loss(state, node, "witnesses", reason, now, at))
        elif now >= end:
            silent_s = now - node.seen.last_heard
            reason = f"not heard of for {silent_s:.1f} s (the lease is {lease})"
            lost.append(_loss(state, node, "lease", reason, now, last_sign(state, node)))
        else:
            ends.append(end)
    missed = [due for name in _away(state) if (due := _missed_at(state, name, timing)) is not None]
    wake_at = min([*ends, *(due for due in missed if due > now)], default=None)
    return decide(lost) or Decision(wake_at=wake_at)


def clear_nodes(context: Context) -> Decision | None:
    cleared = [
        NodeCleared(node=name)
        for name, node in sorted(context.state.nodes.items())
        if node.connected and not node.is_clear and not node.seen.status.workers
    ]
    return decide(cleared, "workers that were not this master's are gone")


def last_sign(state: ClusterState, node: Node) -> float:
    """Return when the node was last known to live. A member of the plan that this master has not
    heard from counts as alive when the plan was made, and at the last recorded step."""
    job, seen = state.job, node.seen
    if seen.heard_at is not None or job is None or not job.current.has_member(node.facts.node):
        return seen.last_heard
    if not job.seen.steps.recent or job.state == "waiting for nodes":
        return seen.last_heard
    there = max(job.seen.steps.recent[-1].time, job.current.made_at)
    return min(seen.last_heard, job.seen.since - (job.seen.since_unix - there))


def _cut_off(state: ClusterState) -> bool:
    """Return whether the master is cut off rather than the nodes: most nodes of the plan are
    away."""
    members = state.job.current.members if state.job is not None else ()
    return 2 * len(_away(state)) > len(members)


def _loss(
    state: ClusterState,
    node: Node,
    cause: Literal["witnesses", "lease"],
    reason: str,
    now: float,
    evidence_at: float,
) -> NodeLost:
    job, name = state.job, node.facts.node
    return NodeLost(
        node=name,
        incarnation=node.facts.incarnation,
        cause=cause,
        reason=reason,
        detect_s=now - evidence_at,
        evidence=carried(job, now) if job is not None and job.current.has_member(name) else (),
    )


def _away(state: ClusterState) -> list[NodeName]:
    """Members of the newest plan whose agents' streams are closed."""
    members = state.job.current.members if state.job is not None else ()
    return [name for name in members if not state.nodes[name].connected]


class _Leases:
    """Leases of all nodes: how long each may be silent, given what is seen of the others."""

    def __init__(self, state: ClusterState, now: float, timing: Detection) -> None:
        self._timing, self._silent_s = timing, _SILENT * timing.heartbeat_s
        seen = [node.seen for node in state.nodes.values() if node.registered]
        # Of those that are lost by now too, so that the others' time does not change with that.
        cuts = (node.seen.cut_at for node in state.nodes.values())
        self._cuts = sorted(at for at in cuts if at is not None)
        #: When the last node came; None: none has, or no node is away.
        self._opened_at: float | None = None
        if any(one.session is None for one in seen):
            opened = (one.opened_at for one in seen if one.opened_at is not None)
            self._opened_at = max(opened, default=None)
        #: When nodes were last heard of, and when those that are back from a silence were before
        #: it, in order; empty: none is silent for a lease.
        self._heard, self._heard_before = list[float](), list[float]()
        if any(now >= one.last_heard + timing.lease_s for one in seen):
            self._heard = sorted(one.last_heard for one in seen)
            self._heard_before = sorted(
                one.heard_before
                for one in seen
                if one.heard_before is not None
                and one.opened_at is not None
                and one.opened_at - one.heard_before > self._silent_s
            )

    def of(self, node: Node) -> tuple[float, str]:
        """Return the end of the node's lease, and a text that gives its length."""
        timing, heard_at = self._timing, node.seen.last_heard
        if node.seen.awaited:
            why = "once the master was away"
        elif self._cut_with_many(node):
            why = "where many streams are cut"
        elif self._silent_with_all(node):
            why = "where all nodes fall silent together"
        else:
            return heard_at + timing.lease_s, f"{timing.lease_s:g} s"
        end = heard_at + timing.return_s
        if self._opened_at is not None:
            most = heard_at + _MOST_RETURNS * timing.return_s
            end = max(end, min(self._opened_at + timing.answer_s, most))
        return end, f"{timing.return_s:g} s {why}"

    def _cut_with_many(self, node: Node) -> bool:
        at, window_s = node.seen.closed_at, self._timing.witness_window_s
        if at is None or self._fell_silent(node):
            return False
        return _between(self._cuts, at - window_s, at + window_s) >= _MANY

    def _silent_with_all(self, node: Node) -> bool:
        """Return whether all nodes heard from since the node's last sign came back from the same
        silence."""
        if len(self._heard) < 2 or not self._fell_silent(node):
            return False
        first, last = node.seen.last_heard - self._silent_s, node.seen.last_heard + self._silent_s
        since = len(self._heard) - bisect_right(self._heard, last)
        return since <= _between(self._heard_before, first, last)

    def _fell_silent(self, node: Node) -> bool:
        """Rather than that its stream was cut, by the end of its agent or on the way."""
        closed_at = node.seen.closed_at
        return closed_at is None or closed_at - node.seen.last_heard > self._silent_s


def _between(times: Sequence[float], first: float, last: float) -> int:
    """Count the `times`, which are sorted, from `first` to `last`, both included."""
    return bisect_right(times, last) - bisect_left(times, first)


def reconnect_s(state: ClusterState, node: Node, now: float, timing: Detection) -> float:
    """Return the seconds left for the node to reconnect, unless something proves its loss
    earlier."""
    end, _ = _Leases(state, now, timing).of(node)
    return end - now


def _missed_at(state: ClusterState, name: NodeName, timing: Detection) -> float | None:
    """Return the time at which a node whose agent's stream is closed counts as missing from the
    rendezvous. By then all connected workers have long left the generation before, and none has
    joined the next one. None: it is not missed."""
    job, closed_at = state.job, state.nodes[name].seen.closed_at
    if job is None or job.current.made is None or job.current.losses or closed_at is None:
        return None
    made, timeline = job.current.made, job.seen.timeline
    if made.boundary or made.handover or made.starting:
        return None  # they may have to wait for something else
    if timeline is None or timeline.aborted_at is None or timeline.joined:
        return None
    here = {worker for worker in made.plan.workers if state.nodes[worker.node].connected}
    if not here <= timeline.answered:
        return None
    return max(closed_at, timeline.aborted_at) + _MISSED_AFTER * timing.heartbeat_s


def _proof(
    state: ClusterState, node: Node, now: float, timing: Detection
) -> tuple[float, str] | None:
    """Return when the first of two witnesses of the node's loss reported, and their words; None:
    there are not two. Called only while most of the plan's nodes are connected."""
    job = state.job
    closed_at = node.seen.closed_at
    name = node.facts.node
    if (
        job is None
        or closed_at is None
        or not (job.current.has_member(name) or name in job.current.leaving)
    ):
        return None
    resumed_at = node.seen.resumed_at
    if resumed_at is not None and closed_at <= resumed_at + timing.answer_s:
        return None  # the agent has given up on this master, and comes back
    for worker, (at, lost) in sorted(job.seen.peers_lost.items()):
        if (
            worker.node != name
            and state.nodes[worker.node].connected
            and abs(at - closed_at) <= timing.witness_window_s
        ):
            reason = f"its agent's stream closed and {worker} lost a peer: {lost.detail}"
            return min(at, closed_at), reason
    missed_at = _missed_at(state, name, timing)
    if missed_at is not None and now >= missed_at:
        return closed_at, "its agent's stream closed and all others wait for it to meet them"
    return None


def forget_nodes(context: Context) -> Decision | None:
    """A node that an operator has drained is kept: it is to be drained when it comes back."""
    state, now = context.state, context.now
    due = {
        name: node.seen.lost_at + context.retention.node_s
        for name, node in state.nodes.items()
        if not node.registered
        and node.seen.lost_at is not None
        and (node.drain is None or node.drain.by != "operator")
    }
    gone = [name for name, at in due.items() if now >= at]
    needed = {name for job in state.jobs.values() for name in _needed(job)} if gone else set()
    forgotten = [NodeForgotten(node=name) for name in sorted(gone) if name not in needed]
    coming = min((at for at in due.values() if now < at), default=None)
    why = f"lost for {context.retention.node_s:g} s"
    return decide(forgotten, why) or Decision(wake_at=coming)


def _needed(job: Job) -> Iterator[NodeName]:
    """Nodes of which the job may still ask what they have."""
    if job.state in ENDED:
        return
    for made in (job.current.made, job.current.trained):
        if made is not None:
            yield from made.plan.nodes
            yield from (worker.node for worker in made.leaving)
    for plan in (job.lineage.before, *job.lineage.plans.values()):
        if plan is not None:
            yield from plan.nodes
    yield from job.current.lost_nodes

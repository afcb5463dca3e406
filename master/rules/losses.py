"""Who is lost: which nodes and workers no longer take part, and on what evidence.

A node is lost when its agent's stream is closed and, close in time, another node's worker
reports a lost peer (two witnesses); or when nothing is heard of it for a lease. On the way into a
generation workers have no connections that could tell of a death: there the other witness is that
all others wait for a meeting that does not take place. A worker is lost when its agent says so.
Pure. A master that came to itself late has extended all leases by as much
(`Tick`), and gives everyone the time to come back that agents of a restarted master have, so its
own pauses convict nobody; and while more than half of a plan's nodes are cut off, it is the master
that is cut off, and only leases count. Many streams that end at once were cut together, and come
back together; and where all nodes fall silent together, it is the head that has lost its network.
Those nodes, too, have the time of a master's restart. Where so many come back that it takes longer,
for the handshakes of all need processors, each has an answer's time after the last one that came.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from oobleck.host.detection import Detection
from oobleck.master.events.nodes import Evidence, NodeLost, WorkerLost
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried, describe_exit, of_exit, of_hang
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.ids import NodeName, WorkerId
from oobleck.proto.types import Hung, WorkerExited

#: Of a heartbeat: so long all others have waited for a meeting when who is away is missed.
_MISSED_AFTER = 0.5
#: So many streams that end within the witness window are cut together.
_MANY = 8
#: Of heartbeats: a node that was silent for longer before its stream's end fell silent, and others
#: have just come to their own end. Nodes last heard of within as long fell silent together.
_SILENT = 2
#: Who is waited for has at most so many times the time to return, however many come back.
_MOST_RETURNS = 3


def lost_nodes(state: ClusterState, now: float, timing: Detection) -> tuple[NodeLost, ...]:
    lost = []
    leases = _Leases.of(state, now, timing)
    cut_off = _cut_off(state)
    for _, node in sorted(state.nodes.items()):
        if not node.registered:
            continue
        silent_s = now - node.seen.last_heard
        proof = None if cut_off else _proof(state, node, now, timing)
        if proof is not None:
            at, reason = proof
            lost.append(_loss(state, node, "witnesses", reason, now, at))
        elif now >= leases.end(node):
            reason = f"not heard of for {silent_s:.1f} s (the lease is {leases.said(node)})"
            lost.append(_loss(state, node, "lease", reason, now, last_sign(state, node)))
    return tuple(lost)


def last_sign(state: ClusterState, node: Node) -> float:
    """When the node was last known to live. One that this master has not heard of was there when
    the plan was made that it is in, and had a part in the last step that there is a record of."""
    job, seen = state.job, node.seen
    if seen.heard_at is not None or job is None or not job.has_member(node.facts.node):
        return seen.last_heard
    if not job.seen.steps.recent or job.state == "waiting for nodes":
        return seen.last_heard
    there = max(job.seen.steps.recent[-1].time, job.made_at)
    return min(seen.last_heard, job.seen.since - (job.seen.since_unix - there))


def _cut_off(state: ClusterState) -> bool:
    """Whether it is the master that is cut off, since most of the plan's nodes are."""
    members = state.job.members if state.job is not None else ()
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
        evidence=carried(job, now) if job is not None and job.has_member(name) else (),
    )


def next_verdict(state: ClusterState, now: float, timing: Detection) -> float | None:
    """When a node may be lost though nothing has happened by then."""
    leases = _Leases.of(state, now, timing)
    ends = [leases.end(node) for node in state.nodes.values() if node.registered]
    missed = [due for name in _away(state) if (due := _missed_at(state, name, timing)) is not None]
    return min([*ends, *(due for due in missed if due > now)], default=None)


def _away(state: ClusterState) -> list[NodeName]:
    """Members of the newest plan whose agents' streams are closed."""
    members = state.job.members if state.job is not None else ()
    return [name for name in members if not state.nodes[name].connected]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leases:
    """For how long nodes may be silent, by what is seen of all of them."""

    timing: Detection
    #: When streams were cut, in order; empty: no node is away.
    cuts: list[float]
    #: When the last node came; None: none has, or no node is away.
    opened_at: float | None
    #: When nodes were last heard of, and when those that are back from a silence were before it, in
    #: order; empty: none is silent for a lease.
    heard: list[float]
    heard_before: list[float]

    @classmethod
    def of(cls, state: ClusterState, now: float, timing: Detection) -> "_Leases":
        seen = [node.seen for node in state.nodes.values() if node.registered]
        heard, before = list[float](), list[float]()
        if any(now >= one.last_heard + timing.lease_s for one in seen):
            heard = sorted(one.last_heard for one in seen)
            before = sorted(
                one.heard_before
                for one in seen
                if one.heard_before is not None
                and one.opened_at is not None
                and one.opened_at - one.heard_before > _SILENT * timing.heartbeat_s
            )
        if all(one.session is not None for one in seen):
            return cls(timing=timing, cuts=[], opened_at=None, heard=heard, heard_before=before)
        return cls(
            timing=timing,
            heard=heard,
            heard_before=before,
            # Of those that are lost by now too, so that the others' time does not change with that.
            cuts=sorted(
                node.seen.cut_at for node in state.nodes.values() if node.seen.cut_at is not None
            ),
            opened_at=max(
                (one.opened_at for one in seen if one.opened_at is not None), default=None
            ),
        )

    def lease_s(self, node: Node) -> float:
        """While nobody comes back."""
        back = node.seen.awaited or self._cut_with_many(node) or self._silent_with_all(node)
        return self.timing.return_s if back else self.timing.lease_s

    def said(self, node: Node) -> str:
        why = ""
        if node.seen.awaited:
            why = " once the master was away"
        elif self._cut_with_many(node):
            why = " where many streams are cut"
        elif self._silent_with_all(node):
            why = " where all nodes fall silent together"
        return f"{self.lease_s(node):g} s{why}"

    def _cut_with_many(self, node: Node) -> bool:
        closed_at, window_s = node.seen.closed_at, self.timing.witness_window_s
        if closed_at is None or self._fell_silent(node):
            return False
        return (
            bisect_right(self.cuts, closed_at + window_s)
            - bisect_left(self.cuts, closed_at - window_s)
            >= _MANY
        )

    def _silent_with_all(self, node: Node) -> bool:
        """Whether all that have been heard of since are back from the same silence."""
        if len(self.heard) < 2 or not self._fell_silent(node):
            return False
        together_s = _SILENT * self.timing.heartbeat_s
        first, last = node.seen.last_heard - together_s, node.seen.last_heard + together_s
        since = len(self.heard) - bisect_right(self.heard, last)
        back = bisect_right(self.heard_before, last) - bisect_left(self.heard_before, first)
        return since <= back

    def _fell_silent(self, node: Node) -> bool:
        """Rather than that its stream was cut, by the end of its agent or on the way."""
        closed_at, last_heard = node.seen.closed_at, node.seen.last_heard
        return closed_at is None or closed_at - last_heard > _SILENT * self.timing.heartbeat_s

    def end(self, node: Node) -> float:
        heard_at, lease_s = node.seen.last_heard, self.lease_s(node)
        end = heard_at + lease_s
        if lease_s == self.timing.return_s and self.opened_at is not None:
            most = heard_at + _MOST_RETURNS * self.timing.return_s
            end = max(end, min(self.opened_at + self.timing.answer_s, most))
        return end


def reconnect_s(state: ClusterState, node: Node, now: float, timing: Detection) -> float:
    """How long the node still has to come back, unless something proves its loss."""
    return _Leases.of(state, now, timing).end(node) - now


def _missed_at(state: ClusterState, name: NodeName, timing: Detection) -> float | None:
    """From when on the node, whose agent's stream is closed, is missed: all that are there have
    left the generation before for long enough, and have not met. None: that is not so."""
    job, closed_at = state.job, state.nodes[name].seen.closed_at
    if job is None or job.made is None or job.losses or closed_at is None:
        return None
    made, timeline = job.made, job.seen.timeline
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
    """When the first of two witnesses came, and what they say, while most others are here."""
    job = state.job
    closed_at = node.seen.closed_at
    name = node.facts.node
    if job is None or closed_at is None or not (job.has_member(name) or name in job.leaving):
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


def lost_workers(state: ClusterState, job: Job, now: float) -> tuple[WorkerLost, ...]:
    """Processes of the newest plan that their agents no longer have."""
    return tuple(_lost_workers(state, job, now))


def _lost_workers(state: ClusterState, job: Job, now: float) -> Iterator[WorkerLost]:
    known, lost = job.lost_workers, job.lost_nodes
    first_report = min((at for at, _ in job.seen.peers_lost.values()), default=now)
    all_committed = job.seen.steps.committed_step >= job.spec.training.steps
    for worker, incarnation in {**job.processes(), **job.leaving_processes()}.items():
        node = state.nodes[worker.node]
        if worker in known or worker.node in lost or not node.connected:
            continue
        exited, hung = (
            job.seen.processes.exits.get(incarnation),
            job.seen.processes.hung.get(incarnation),
        )
        status = node.seen.status
        process = status.worker(worker.slot) if status.job_id == job.id else None
        here = process is not None and process.incarnation == incarnation
        if here and not job.seen.is_gone(incarnation):
            continue
        if all_committed and job.has_finished(incarnation):
            continue
        yield WorkerLost(
            job_id=job.id,
            worker=worker,
            incarnation=incarnation,
            reason=hung.reason if hung else _end(exited),
            detect_s=hung.seconds if hung else max(0.0, now - first_report),
            evidence=_evidence(job, worker, now, exited, hung),
            hung=hung is not None,
            words=job.seen.since_step.complaints.get(worker, ""),
            lost_peer=worker in job.seen.peers_lost,
        )


def _end(exited: WorkerExited | None) -> str:
    return describe_exit(exited) if exited else "its agent does not have it any more"


def _evidence(
    job: Job, worker: WorkerId, now: float, exited: WorkerExited | None, hung: Hung | None
) -> Evidence | None:
    """Its agent's word; None: there is none."""
    if hung is not None:
        return of_hang(worker, hung)
    return of_exit(job, worker, exited, now) if exited else None

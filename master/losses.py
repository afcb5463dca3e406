"""Who is lost: which nodes and workers no longer take part, and on what evidence.

A node is lost when its agent's stream is closed and, close in time, another node's worker
reports a lost peer (two witnesses); or when nothing is heard of it for a lease. On the way into a
generation workers have no connections that could tell of a death: there the other witness is that
all others wait for a meeting that does not take place. A worker is lost when its agent says so.
Pure. A master that came to itself late has extended all leases by as much
(`Tick`), and gives everyone the time to come back that agents of a restarted master have, so its
own pauses convict nobody; and while more than half of a plan's nodes are cut off, it is the master
that is cut off, and only leases count.
"""

from collections.abc import Iterator
from typing import Literal

from oobleck.host.detection import Detection
from oobleck.master.job import Job
from oobleck.master.node import Node
from oobleck.master.nodeevents import NodeLost, Sighting, WorkerLost
from oobleck.master.sightings import carried, describe_exit, of_exit, of_hang
from oobleck.master.state import ClusterState
from oobleck.planner.ids import NodeName, WorkerId
from oobleck.proto.types import Hung, WorkerExited

#: Of a heartbeat: so long all others have waited for a meeting when who is away is missed.
_MISSED_AFTER = 0.5


def lost_nodes(state: ClusterState, now: float, timing: Detection) -> tuple[NodeLost, ...]:
    lost = []
    for _, node in sorted(state.nodes.items()):
        if not node.registered:
            continue
        silent_s = now - node.seen.last_heard
        if (proof := _proof(state, node, now, timing)) is not None:
            at, reason = proof
            lost.append(_loss(state, node, "witnesses", reason, now, at))
        elif now >= _lease_end(node, timing):
            away = " once the master was away" if node.seen.awaited else ""
            reason = (
                f"not heard of for {silent_s:.1f} s (the lease is {lease(node, timing):g} s{away})"
            )
            lost.append(_loss(state, node, "lease", reason, now, node.seen.last_heard))
    return tuple(lost)


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
        sightings=carried(job, now) if job is not None and job.has_member(name) else (),
    )


def next_verdict(state: ClusterState, now: float, timing: Detection) -> float | None:
    """When a node may be lost though nothing has happened by then."""
    ends = [_lease_end(n, timing) for n in state.nodes.values() if n.registered]
    missed = [due for name in _away(state) if (due := _missed_at(state, name, timing)) is not None]
    return min([*ends, *(due for due in missed if due > now)], default=None)


def _away(state: ClusterState) -> list[NodeName]:
    """Members of the newest plan whose agents' streams are closed."""
    members = state.job.members if state.job is not None else ()
    return [name for name in members if not state.nodes[name].connected]


def lease(node: Node, timing: Detection) -> float:
    """For how long the node may be silent."""
    return timing.return_s if node.seen.awaited else timing.lease_s


def _lease_end(node: Node, timing: Detection) -> float:
    return node.seen.last_heard + lease(node, timing)


def _missed_at(state: ClusterState, name: NodeName, timing: Detection) -> float | None:
    """From when on the node, whose agent's stream is closed, is missed: all that are there have
    left the generation before for long enough, and have not met. None: that is not so."""
    job, closed_at = state.job, state.nodes[name].seen.closed_at
    if job is None or job.made is None or job.losses or closed_at is None:
        return None
    made, way = job.made, job.seen.way
    if made.boundary or made.handover or made.starting:
        return None  # they may have to wait for something else
    if way is None or way.aborted_at is None or way.joined:
        return None
    here = {worker for worker in made.plan.workers if state.nodes[worker.node].connected}
    if not here <= way.answered:
        return None
    return max(closed_at, way.aborted_at) + _MISSED_AFTER * timing.heartbeat_s


def _proof(
    state: ClusterState, node: Node, now: float, timing: Detection
) -> tuple[float, str] | None:
    """When the first of two witnesses came, and what they say."""
    job = state.job
    closed_at = node.seen.closed_at
    name = node.facts.node
    if job is None or closed_at is None or not (job.has_member(name) or name in job.leaving):
        return None
    resumed_at = node.seen.resumed_at
    if resumed_at is not None and closed_at <= resumed_at + timing.answer_s:
        return None  # the agent has given up on this master, and comes back
    away = sum(1 for member in job.members if not state.nodes[member].connected)
    if 2 * away > len(job.members):
        return None
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
    all_committed = job.seen.committed_step >= job.spec.training.steps
    for worker, incarnation in {**job.processes(), **job.leaving_processes()}.items():
        node = state.nodes[worker.node]
        if worker in known or worker.node in lost or not node.connected:
            continue
        exited, hung = job.seen.exits.get(incarnation), job.seen.hung.get(incarnation)
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
            sighting=_sighting(job, worker, now, exited, hung),
            hung=hung is not None,
            words=job.seen.complaints.get(worker, ""),
            lost_peer=worker in job.seen.peers_lost,
        )


def _end(exited: WorkerExited | None) -> str:
    return describe_exit(exited) if exited else "its agent does not have it any more"


def _sighting(
    job: Job, worker: WorkerId, now: float, exited: WorkerExited | None, hung: Hung | None
) -> Sighting | None:
    """Its agent's word; None: there is none."""
    if hung is not None:
        return of_hang(worker, hung)
    return of_exit(job, worker, exited, now) if exited else None

"""Rules about losses of nodes and of workers: evidence, replacements, and when nodes are forgotten.

A node is lost when its agent's stream is closed and, close in time, another node's worker reports a
lost peer (two witnesses). On the way into a generation workers have no connections that could show
a death. There the second witness is that all others wait at the rendezvous. A node is also lost
when nothing is heard of it for a lease (`oobleck.master.state.leases`). While more than half of a
plan's nodes are cut off, the master itself is taken to be cut off, and only leases count.

A worker is lost when its agent says so. The agent forks a replacement as it reports the end, and
names it at once. The next plan counts on it from then on, so the others join the rendezvous while
it starts. If it is not up in time, the others continue without it if they can.

Nodes that were lost long ago are forgotten, so that the state does not grow for ever. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from oobleck.core.ids import NodeName, WorkerId
from oobleck.host.detection import Detection
from oobleck.master.events.jobs import Evidence
from oobleck.master.events.nodes import NodeCleared, NodeForgotten, NodeLost, WorkerLost
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.rules.next_plan import can_spare
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried, of_exit, of_hang
from oobleck.master.state.incident import describe_exit
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.leases import Leases, last_sign
from oobleck.master.state.node import Node
from oobleck.proto.types import Hung, WorkerExited

#: Heartbeats for which all others wait at a rendezvous before a node that is away counts as
#: missing.
_MISSED_AFTER = 0.5
_NOT_THERE = "its agent does not have it any more"


def lose_nodes(context: Context) -> Decision:
    """Declare nodes lost, by two witnesses or by the lease."""
    state, now, timing = context.state, context.now, context.timing
    lost, ends = list[NodeLost](), list[float]()
    leases, cut_off = Leases(state, now, timing), _cut_off(state)
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
    """Note nodes without workers that are stale or of an unknown job."""
    cleared = [
        NodeCleared(node=name)
        for name, node in sorted(context.state.nodes.items())
        if node.connected and not node.is_clear and not node.seen.status.workers
    ]
    return decide(cleared, "workers that were not this master's are gone")


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
    restarted = node.seen.rival is not None  # the host was not rebooted
    return NodeLost(
        node=name,
        incarnation=node.facts.incarnation,
        cause=cause,
        reason=reason,
        detect_s=now - evidence_at,
        with_master=node.seen.awaited and not restarted,
        evidence=carried(job, now) if job is not None and job.current.has_member(name) else (),
    )


def _away(state: ClusterState) -> list[NodeName]:
    """Return the members of the newest plan whose agents' streams are closed."""
    members = state.job.current.members if state.job is not None else ()
    return [name for name in members if not state.nodes[name].connected]


def _missed_at(state: ClusterState, name: NodeName, timing: Detection) -> float | None:
    """Return the time at which a node whose agent's stream is closed counts as missing from the
    rendezvous. By then all connected workers have long left the previous generation, and none has
    joined the next one. None: it is not missed."""
    job, closed_at = state.job, state.nodes[name].seen.closed_at
    if job is None or job.current.made is None or job.current.losses or closed_at is None:
        return None
    made, timeline = job.current.made, job.seen.timeline
    if made.boundary or made.handover or made.starting:
        return None  # its workers may wait for another reason
    if timeline is None or timeline.aborted_at is None or timeline.joined:
        return None
    here = {worker for worker in made.plan.workers if state.nodes[worker.node].connected}
    if not here <= timeline.answered:
        return None
    return max(closed_at, timeline.aborted_at) + _MISSED_AFTER * timing.heartbeat_s


def _proof(
    state: ClusterState, node: Node, now: float, timing: Detection
) -> tuple[float, str] | None:
    """Return when the first of two witnesses of the node's loss reported, and their reports; None:
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
        return None  # the agent ended the stream itself, since the master was late, and returns
    for worker, (at, lost) in sorted(job.seen.peers_lost.items()):
        if (
            worker.node != name
            and state.nodes[worker.node].connected
            and abs(at - closed_at) <= timing.witness_window_s
        ):
            reason = f"its agent's stream closed and {worker} lost a peer"
            # It may have seen only that another one, which lost this node, has left the generation.
            of_another = lost.detail.partition("/")[0] in state.nodes.keys() - {name}
            return min(at, closed_at), reason if of_another else f"{reason}: {lost.detail}"
    missed_at = _missed_at(state, name, timing)
    if missed_at is not None and now >= missed_at:
        return closed_at, "its agent's stream closed and all others wait for it to meet them"
    return None


def forget_nodes(context: Context) -> Decision | None:
    """Forget nodes that were lost long ago, except those that an operator drained: the drain still
    applies when they return."""
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


def why_not_forgotten(state: ClusterState, name: NodeName) -> str:
    """Return why an operator cannot have the node forgotten, with the fix; empty: it can be."""
    if state.nodes[name].registered:
        return (
            f"its agent is not known to have ended: 'oobleck node drain {name} --wait', then stop "
            "the agent"
        )
    for job in state.jobs.values():
        if name in _needed(job):
            return (
                f"job {job.id} may still need what it holds: wait until the job has gone on "
                f"without it, or 'oobleck cancel {job.id}'"
            )
    return ""


def _needed(job: Job) -> Iterator[NodeName]:
    """Yield the nodes whose state the job may still need."""
    if job.state in ENDED:
        return
    for made in (job.current.made, job.current.trained):
        if made is not None:
            yield from made.plan.nodes
            if job.current.on_the_way:
                yield from (worker.node for worker in made.leaving)
    for plan in job.lineage.plans.values():
        yield from plan.nodes
    yield from job.current.lost_nodes


def lose_workers(context: Context, job: Job) -> Decision | None:
    """Declare worker processes of the newest plan lost."""
    lost = list(_lost_workers(context.state, job, context.now))
    return decide(lost, "; ".join(f"{loss.worker}: {loss.reason}" for loss in lost))


def _lost_workers(state: ClusterState, job: Job, now: float) -> Iterator[WorkerLost]:
    """Yield the processes of the newest plan that their agents no longer have."""
    known, lost = job.current.lost_workers, job.current.lost_nodes
    first_report = min((at for at, _ in job.seen.peers_lost.values()), default=now)
    all_committed = job.committed_step >= job.spec.training.steps
    for worker, incarnation in {
        **job.current.processes(),
        **job.current.leaving_processes(),
    }.items():
        node = state.nodes[worker.node]
        if worker in known or worker.node in lost or not node.connected:
            continue
        exited = job.seen.processes.exits.get(incarnation)
        hung = job.seen.processes.hung.get(incarnation)
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
            reason=hung.reason if hung else describe_exit(exited) if exited else _NOT_THERE,
            detect_s=hung.seconds if hung else max(0.0, now - first_report),
            evidence=_evidence(job, worker, now, exited, hung),
            hung=hung is not None,
            words=job.seen.since_step.complaints.get(worker, ""),
            lost_peer=worker in job.seen.peers_lost,
        )


def _evidence(
    job: Job, worker: WorkerId, now: float, exited: WorkerExited | None, hung: Hung | None
) -> Evidence | None:
    """Return the agent's evidence of the worker's end or hang; None: there is none."""
    if hung is not None:
        return of_hang(worker, hung)
    return of_exit(job, worker, exited, now) if exited else None


def give_up_late(context: Context, job: Job) -> Decision | None:
    """Continue without a process that the plan counts on and that does not start."""
    state = context.state
    if job.current.made is None or job.seen.planned_at is None:
        return None
    names = {worker.node for worker in job.current.made.starting}
    if (
        job.current.losses
        or not names
        or not all(state.nodes[name].connected for name in job.current.members)
    ):
        return None
    late = tuple(_not_up(context, job))
    if not late:
        return None
    due = job.seen.planned_at + _grace_s(context, job)
    if context.now < due:
        return Decision(wake_at=due, reason=f"{_names(late)}: a process is being started")
    if not can_spare(context, job, {NodeName(loss.worker.node) for loss in late}):
        return Decision(reason=f"{_names(late)}: the others wait for a process to start")
    return Decision(actions=late, reason=f"{_names(late)}: {late[0].reason}")


def _grace_s(context: Context, job: Job) -> float:
    """Return the longest grace period of the nodes whose workers are starting, seconds. It goes by
    the newest start on their kind of device, since the first may have compiled."""
    assert job.current.made is not None
    nodes = [context.state.nodes[worker.node].facts for worker in job.current.made.starting]
    started_s = {
        kind: max(
            node.seen.started
            for node in context.state.nodes.values()
            if node.facts.device_kind == kind
        )[1]
        for kind in {node.device_kind for node in nodes}
    }
    return max(context.timing.grace_s(one.device, started_s[one.device_kind]) for one in nodes)


def _not_up(context: Context, job: Job) -> Iterator[WorkerLost]:
    processes, since = job.current.processes(), job.seen.planned_at
    assert job.current.made is not None
    assert since is not None
    for worker in job.current.made.starting:
        process = context.state.nodes[worker.node].seen.status.worker(worker.slot)
        if process is None or process.incarnation != processes[worker] or process.card:
            continue
        yield WorkerLost(
            job_id=job.id,
            worker=worker,
            incarnation=process.incarnation,
            reason=f"its new process is not up after {round(_grace_s(context, job), 1):g} s",
            detect_s=context.now - since,
            late=True,
        )


def _names(late: Sequence[WorkerLost]) -> str:
    return ", ".join(str(loss.worker) for loss in late)

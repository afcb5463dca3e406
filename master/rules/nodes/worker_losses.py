"""Rules about the processes that a plan counts on: which are lost, and which take their places.

A worker is lost when its agent says so. The agent forks another one as it reports the end, and
names it at once, though it is up only later. The next plan counts on it from then on, so that the
others are told without waiting for it: they leave what they are blocked in and come to the
rendezvous while it starts. One that is not up in time is done without, if the others can, and joins
them when it is.
"""

from collections.abc import Iterator, Sequence

from oobleck.core.ids import NodeName, WorkerId
from oobleck.master.events.nodes import Evidence, WorkerLost
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.rules.jobs import stalls
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import describe_exit, of_exit, of_hang
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.proto.types import Hung, WorkerExited

_NOT_THERE = "its agent does not have it any more"


def lose_workers(context: Context, job: Job) -> Decision | None:
    lost = list(_lost_workers(context.state, job, context.now))
    return decide(lost, "; ".join(f"{loss.worker}: {loss.reason}" for loss in lost))


def _lost_workers(state: ClusterState, job: Job, now: float) -> Iterator[WorkerLost]:
    """Processes of the newest plan that their agents no longer have."""
    known, lost = job.current.lost_workers, job.current.lost_nodes
    first_report = min((at for at, _ in job.seen.peers_lost.values()), default=now)
    all_committed = job.seen.steps.committed_step >= job.spec.training.steps
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


def coming(state: ClusterState, job: Job, nodes: Sequence[Node]) -> list[Node]:
    """Return those of `nodes`, members that are not ready, whose missing workers are all on the
    way.

    Returns none where no worker is up that the next plan may count on: nobody waits then, and there
    is nobody to meet.
    """
    if not any(_is_up(job, node) for node in state.candidates(job)):
        return []
    lost = {loss.incarnation for loss in job.current.losses if isinstance(loss, WorkerLost)}
    found = []
    for node in nodes:
        status = node.seen.status
        here = [
            worker
            for worker in status.workers
            if not job.seen.is_gone(worker.incarnation) and worker.incarnation not in lost
        ]
        full = len(here) == node.facts.worker_slots
        if node.connected and status.job_id == job.id and full:
            found.append(node)
    return found


def _is_up(job: Job, node: Node) -> bool:
    """Return whether a worker of the newest plan is up on the node."""
    mine = set(job.current.processes().values())
    return node.connected and any(
        worker.card and worker.incarnation in mine and not job.seen.is_gone(worker.incarnation)
        for worker in node.seen.status.workers
    )


def takes_longer(job: Job, node: Node) -> bool:
    """Return whether the replacement of a lost process on the node will take long. Either the
    replacement is late already, or the agent's last status lists none, though it forks one as soon
    as it may."""
    status = node.seen.status
    late = any(
        isinstance(loss, WorkerLost) and loss.late and loss.worker.node == node.facts.node
        for loss in job.current.losses
    )
    return late or (status.job_id == job.id and len(status.workers) < node.facts.worker_slots)


def give_up_late(context: Context, job: Job) -> Decision | None:
    """Go on without a process that the plan counts on and that does not get up."""
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
    if not stalls.can_spare(context, job, {NodeName(loss.worker.node) for loss in late}):
        return Decision(reason=f"{_names(late)}: the others wait for a process to start")
    return Decision(actions=late, reason=f"{_names(late)}: {late[0].reason}")


def _grace_s(context: Context, job: Job) -> float:
    """Return the longest grace period of the nodes whose workers are starting, seconds."""
    assert job.current.made is not None
    nodes = [context.state.nodes[worker.node] for worker in job.current.made.starting]
    return max(context.timing.grace_s(node.facts.device) for node in nodes)


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
            reason=f"its new process is not up after {_grace_s(context, job):g} s",
            detect_s=context.now - since,
            late=True,
        )


def _names(late: Sequence[WorkerLost]) -> str:
    return ", ".join(str(loss.worker) for loss in late)

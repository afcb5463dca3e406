"""Rules about turns: one job trains at a time, in the order of submission, and who steps aside.

A job that nothing was trained of yet and that the nodes are too few for does not keep others from
training: it gives its turn to the first job after it that could start on the nodes that there are
(backfilling, as batch schedulers call it), and is asked again first when that one has ended. So
does a job that was trained and has waited for nodes for long, if it has a checkpoint: its workers
are ended, and it goes on from there. Without one its state is in its workers' memory alone, and it
keeps its turn as long as it may get on. No job that trains is interrupted for another one. So a
job that nodes train has the turn, though it is another one's by the journal.

Jobs that ended long ago are forgotten, or the state would grow for ever; their files stay.
"""

from collections.abc import Collection

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.master.events.jobs import JobForgotten, JobPutBack, JobStarted
from oobleck.master.planning import client
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.jobs.profiling import profile_of_adopted
from oobleck.master.rules.plans import adoption, first_plan, holders
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job


def next_job(context: Context) -> Decision | None:
    state = context.state
    if state.active is not None:
        return None
    queued = [job for job in state.jobs.values() if job.state == "queued"]
    if not queued:
        return None
    first = next((job for job in queued if not job.passed_over), queued[0])
    return Decision(actions=(JobStarted(job_id=first.id),), reason=f"it is {first.id}'s turn")


def take_up(context: Context) -> Decision | None:
    """Give the turn to a job that waits in the queue by the journal and that nodes train: this
    master goes on from a copy of before its start.

    The job that has the turn by the journal goes back into the queue. It has ended since, or given
    way, if no node has a process of its plan. Nodes that are away may have one, so those that train
    the other job must be more than these, and most of the cluster, so that no single node takes the
    turn by its word.
    """
    state, active = context.state, context.state.job
    for job_id in state.held:
        job = state.jobs.get(job_id)
        if job is None or not adoption.is_queued(state.held[job_id]):
            continue
        told, nodes = adoption.newest_told(state, job)
        due = job.seen.since + context.timing.return_s
        registered = [node for node in state.nodes.values() if node.registered]
        if context.now < due and (told != nodes or not all(n.connected for n in registered)):
            reason = f"{job_id} is trained, and waits in the queue until all nodes are back"
            return Decision(wake_at=due, reason=reason, holds_plans=True)
        if 2 * len(told) <= max(len(nodes), len(registered)) or _may_go_on(state, active, told):
            continue
        put_back = (JobPutBack(job_id=active.id, instead=job_id),) if active is not None else ()
        profile = (profile_of_adopted(state, job, told),) if _lacks_profile(job) else ()
        return Decision(
            actions=(*put_back, JobStarted(job_id=job_id), *profile),
            reason=f"{job_id} is trained already",
        )
    return None


def _may_go_on(state: ClusterState, job: Job | None, others: Collection[NodeName]) -> bool:
    """Return whether a node has a process of the job's plan, or as many nodes as `others` may have
    some, since they are away."""
    if job is None or job.current.made is None:
        return False
    away: set[NodeName] = set()
    for worker, process in job.current.processes().items():
        node = state.nodes.get(worker.node)
        status = None if node is None else node.seen.status.worker(worker.slot)
        if node is None or not node.connected:
            away.add(worker.node)
        elif node.held is None and status is not None and status.incarnation == process:
            return True
    return len(away) >= len(others)


def _lacks_profile(job: Job) -> bool:
    return job.profiling.chosen is None and job.spec.profile == "measure"


def give_way(context: Context, job: Job) -> Decision | None:
    state = context.state
    if job.state != "waiting for nodes":
        return None
    if (other := _next_that_fits(state)) is None or (due := _gives_way_at(context, job)) is None:
        return None
    if context.now < due:
        return Decision(wake_at=due, reason=f"{other.id} can start, {job.id} may yet go on")
    if (
        not _has_nothing_to_lose(context, job)
        and (ready := first_plan.get_ready(context, job)) is not None
    ):
        return ready  # it may go on with them
    event = JobPutBack(job_id=job.id, instead=other.id)
    return Decision(actions=(event,), reason=f"{other.id} can start, {job.id} cannot")


def _gives_way_at(context: Context, job: Job) -> float | None:
    """Return the time at which a waiting job gives up its turn; None: it keeps its turn."""
    if _has_nothing_to_lose(context, job):
        return context.now
    return job.seen.waits_since + context.gives_way_s if job.has_checkpoint else None


def _has_nothing_to_lose(context: Context, job: Job) -> bool:
    return (
        job.current.made is None
        or job.current.put_back
        or not holders.was_trained(context.state, job)
    )


def outlook(state: ClusterState, job: Job, gives_way_s: float, now: float) -> str:
    """Describe for operators whether and when a waiting job gives up its turn; empty: no other job
    wants the turn, or it was given up already."""
    other = _next_that_fits(state)
    if job.state != "waiting for nodes" or state.active != job.id or other is None:
        return ""
    if not job.has_checkpoint:
        return (
            f"keeps its turn before {other.id}, since its state is nowhere else: 'oobleck cancel "
            f"{job.id}' gives it up"
        )
    left_s = max(0.0, job.seen.waits_since + gives_way_s - now)
    return f"gives way to {other.id} in {left_s:.0f} s, and goes on from its checkpoint after it"


def _next_that_fits(state: ClusterState) -> Job | None:
    queued = (j for j in state.jobs.values() if j.state == "queued" and not j.passed_over)
    return next((job for job in queued if _fits(state, job)), None)


def _fits(state: ClusterState, job: Job) -> bool:
    """Return whether the job could start on the connected nodes, as far as is known."""
    nodes = [node for node in state.alike(job)[0] if node.connected]
    try:
        client.check_enough(job, nodes)
    except PlanInfeasible:
        return job.profile_only and bool(nodes)
    return True


def forget_jobs(context: Context) -> Decision | None:
    ended = [job for job in context.state.jobs.values() if job.state in ENDED]
    most = context.retention.ended_jobs
    if len(ended) <= most:
        return None
    ended.sort(key=lambda job: job.finished_at)
    forgotten = tuple(JobForgotten(job_id=job.id) for job in ended[:-most])
    return Decision(actions=forgotten, reason=f"the last {most} jobs that ended are known")

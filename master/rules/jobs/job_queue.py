"""Rules about turns: one job trains at a time, in the order of submission, and who steps aside.

A job that nothing was trained of yet and that the nodes are too few for does not keep others from
training: it gives its turn to the first job after it that could start on the nodes that there are
(backfilling, as batch schedulers call it), and is asked again first when that one has ended. So
does a job that was trained and has waited for nodes for long, if it has a checkpoint: its workers
are ended, and it goes on from there. Without one its state is in its workers' memory alone, and it
keeps its turn as long as it may get on. No job that trains is interrupted for another one.

Jobs that ended long ago are forgotten, or the state would grow for ever; their files stay.
"""

from oobleck.master.events.jobs import JobForgotten, JobPutBack, JobStarted
from oobleck.master.planning import client
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.plans import adoption, first_plan, holders
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job
from oobleck.planner.errors import PlanInfeasible


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
    """Give its turn to a job that waits in the queue by the journal and that nodes train: the
    master goes on from a copy of before its start.

    All nodes of its newest plan must say so, and be more than half of those and the nodes of the
    job that has the turn by the journal, which nobody may train: it has ended since, or has given
    way. That one goes back into the queue.
    """
    state, active = context.state, context.state.job
    for job_id, held in state.held.items():
        if not adoption.is_queued(held):
            continue
        job = state.jobs[job_id]
        members = set(active.current.members) if active is not None else set()
        away = {name for name in members if not state.nodes[name].connected}
        due = job.seen.since + context.timing.return_s
        try:
            nodes = adoption.nodes_of(adoption.told_by_all(held))
        except adoption.NotAdopted as why:
            nodes, reason = set(), f"{job_id} is trained and waits in the queue: {why}"
        else:
            reason = f"{job_id} is trained and waits in the queue; {active and active.id} may be"
        if context.now < due and (away or not nodes):
            return Decision(wake_at=due, reason=reason, holds_plans=True)
        there = {name for name in members | nodes if state.nodes[name].registered}
        if 2 * len(nodes) <= len(there) or _is_trained(state, active):
            continue
        started = JobStarted(job_id=job_id)
        if active is None:
            return Decision(actions=(started,), reason=f"{job_id} is trained already")
        put_back = JobPutBack(job_id=active.id, instead=job_id)
        return Decision(
            actions=(put_back, started), reason=f"{job_id} is trained already, and {active.id} not"
        )
    return None


def _is_trained(state: ClusterState, job: Job | None) -> bool:
    """Return whether any node has workers of the job."""
    return job is not None and any(
        node.connected and node.held is None and node.seen.status.job_id == job.id
        for node in state.nodes.values()
        if node.seen.status.workers
    )


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

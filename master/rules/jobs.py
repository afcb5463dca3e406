"""Rules about jobs: the queue, first and repeated steps, checkpoints, and the end.

One job trains at a time, in the order of submission. A job that was never trained and that has too
few nodes gives its turn to the first job after it that could start. Batch schedulers call that
backfilling. It is first in the queue again when that job has ended. A trained job gives way after a
long wait, if it has a checkpoint: its workers are ended, and it resumes from there. Without a
checkpoint its state is in its workers' memory alone, and it keeps its turn. No job that trains is
interrupted for another one.

Workers take checkpoints and return to them by themselves; the master notes each report once. Jobs
that ended long ago are forgotten, so that the state does not grow for ever. Their files stay.
"""

from oobleck.core.errors import PlanInfeasible
from oobleck.core.messages import CheckpointSaved, Restored, SaveFailed
from oobleck.host.detection import GATHER_REPORTS_S
from oobleck.master.events.jobs import (
    CheckpointPublished,
    CheckpointRequested,
    FirstStepCommitted,
    JobCancelled,
    JobCaughtUp,
    JobForgotten,
    JobPutBack,
    JobRestored,
    JobStarted,
    JobSucceeded,
    RecordsLost,
    SaveProblem,
)
from oobleck.master.planning import client
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.next_plan import get_ready
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried, transition_stats
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.job_observed import SaveReport


def next_job(context: Context) -> Decision | None:
    """Make the first job in the queue active, if none is."""
    state = context.state
    if state.active is not None:
        return None
    queued = [job for job in state.jobs.values() if job.state == "queued"]
    if not queued:
        return None
    first = next((job for job in queued if not job.passed_over), queued[0])
    return Decision(actions=(JobStarted(job_id=first.id),), reason=f"it is {first.id}'s turn")


def give_way(context: Context, job: Job) -> Decision | None:
    """Return the active job to the queue, if it waits for nodes and another one could start."""
    state = context.state
    if job.state != "waiting for nodes":
        return None
    if (other := _next_that_fits(state)) is None or (due := _gives_way_at(context, job)) is None:
        return None
    if context.now < due:
        return Decision(wake_at=due, reason=f"{other.id} can start, {job.id} may yet go on")
    if not _has_nothing_to_lose(context, job) and (ready := get_ready(context, job)) is not None:
        return ready  # the job may resume once they are ready
    event = JobPutBack(job_id=job.id, instead=other.id)
    return Decision(actions=(event,), reason=f"{other.id} can start, {job.id} cannot")


def _gives_way_at(context: Context, job: Job) -> float | None:
    """Return the time at which a waiting job gives way; None: it does not."""
    if _has_nothing_to_lose(context, job):
        return context.now
    return job.seen.waits_since + context.gives_way_s if job.has_checkpoint else None


def _has_nothing_to_lose(context: Context, job: Job) -> bool:
    return (
        job.current.made is None
        or job.current.put_back
        or not questions.was_trained(context.state, job)
    )


def outlook(state: ClusterState, job: Job, gives_way_s: float, now: float) -> str:
    """Describe for operators whether and when a waiting job gives way. Empty: no other job could
    start, or it has given way already."""
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
    """Forget the jobs that ended longest ago."""
    ended = [job for job in context.state.jobs.values() if job.state in ENDED]
    most = context.retention.ended_jobs
    if len(ended) <= most:
        return None
    ended.sort(key=lambda job: job.finished_at)
    forgotten = tuple(JobForgotten(job_id=job.id) for job in ended[:-most])
    return Decision(actions=forgotten, reason=f"the last {most} jobs that ended are known")


def first_step(context: Context, job: Job) -> Decision | None:
    """Note the newest generation's first committed step."""
    if not job.current.on_the_way:
        return None
    steps, generation = job.seen.steps, job.current.generation
    step = next((r.step for r in steps.recent if r.generation >= generation), None)
    due = _reports_due_at(context, job)
    if step is None and steps.redone is not None:
        redoes, first, last = steps.redone
        step = last if redoes == generation and last > first else None
    if step is None and steps.furthest_in == generation:
        # Wait a little for the step's record, which has more and usually arrives with these
        # statuses.
        step, due = steps.furthest_step, max(due, _first_step_seen_at(job) + GATHER_REPORTS_S)
    how = transition_stats(job, context.now)
    if step is None or how is None:
        return None
    if due > context.now:
        return Decision(
            wake_at=due, reason="workers have not reported yet how they entered the generation"
        )
    older = (r for r in reversed(job.seen.steps.recent) if r.generation < job.current.generation)
    before = next(older, job.seen.steps.last_before)
    event = FirstStepCommitted(
        job_id=job.id,
        generation=job.current.generation,
        step=step,
        transition=how,
        evidence=carried(job, context.now),
        trained_until=before.time if before is not None else 0.0,
    )
    return Decision(
        actions=(event,), reason=f"generation {job.current.generation} has committed a step"
    )


def _first_step_seen_at(job: Job) -> float:
    timeline = job.seen.timeline
    return timeline.first_step_at or 0.0 if timeline is not None else 0.0


def _reports_due_at(context: Context, job: Job) -> float:
    """Return the time until which to wait for all workers' reports on the transition, which agents
    send with the newest generation's first step. 0: do not wait."""
    made, timeline = job.current.made, job.seen.timeline
    if made is None or timeline is None or timeline.first_step_at is None:
        return 0.0
    if job.current.losses or job.seen.peers_lost:
        return 0.0
    late = (worker for worker in made.plan.workers if worker not in timeline.entered)
    if not any(context.state.nodes[worker.node].connected for worker in late):
        return 0.0
    return timeline.first_step_at + GATHER_REPORTS_S


def caught_up(context: Context, job: Job) -> Decision | None:
    """Note that the steps lost by the return to a checkpoint are committed again."""
    if not job.rollback.redo_until or job.seen.steps.furthest_step < job.redone_until:
        return None
    event = JobCaughtUp(job_id=job.id, step=job.seen.steps.furthest_step)
    return Decision(actions=(event,), reason=f"step {event.step} is committed again")


def end_jobs(context: Context) -> Decision | None:
    """End jobs that are cancelled or finished."""
    for job in context.state.jobs.values():
        if job.cancel_requested and job.finished_at == 0.0:
            event = JobCancelled(job_id=job.id, transition=transition_stats(job, context.now))
            return Decision(actions=(event,), reason="the operator cancelled the job")
    active = context.state.job
    if active is None:
        return None
    return _succeed(context, active)


def _succeed(context: Context, job: Job) -> Decision | None:
    if not job.all_finished():
        return None
    steps, through = job.spec.training.steps, job.seen.steps.recorded_step
    if through < steps or _lacks_evaluations(job):
        missing = f"all workers have finished; the records of steps {through + 1} to {steps} lack"
        if through == steps:
            missing = "all workers have finished; the last evaluation lacks"
        if not all(context.state.nodes[name].connected for name in job.current.members):
            return Decision(reason=missing)
        if job.seen.steps.records_wait:
            return Decision(reason=missing)
        # Connected agents send their records at once, so wait only a little.
        last = max(job.seen.progressed_at or context.now, job.seen.steps.recorded_at or 0.0)
        if context.now < (due := last + context.timing.meeting_s):
            return Decision(wake_at=due, reason=missing)
    # A previous master may have declared records lost and ended before it wrote later ones.
    reported = max((one.last for one in job.lost.last), default=0)
    first = max(through, reported) + 1
    lost = (records_lost(job, range(first, steps + 1)),) if first <= steps else ()
    event = JobSucceeded(job_id=job.id, transition=transition_stats(job, context.now))
    return Decision(actions=(*lost, event), reason="all workers have finished")


def _lacks_evaluations(job: Job) -> bool:
    """Return whether the evaluation after the last step is still missing."""
    newest = job.seen.steps.evaluation
    wanted = job.spec.evaluation is not None
    return wanted and (newest is None or newest.step < job.spec.training.steps)


def records_lost(job: Job, steps: range) -> RecordsLost:
    """Return the event that no agent has sent these records, with the reason, as far as it is
    known."""
    why, restored = "nobody who is connected has them", job.rollback.restored
    if restored is not None and steps.start <= restored.step:
        what = restored.records_problem or "there are none"
        why = f"all who had them have ended; beside the checkpoint of {restored.step}: {what}"
    return RecordsLost(job_id=job.id, first=steps.start, last=steps.stop - 1, why=why)


def note_checkpoint(context: Context) -> Decision | None:
    """Journal workers' reports on checkpoints."""
    for job in context.state.jobs.values():
        if (report := job.due_report()) is not None:
            event = _event(job, report)
            return Decision(actions=(event,), reason="a worker reported on a checkpoint")
    return None


def save_in_time(context: Context, job: Job) -> Decision | None:
    """Request a checkpoint of a job that leaves their times to the master."""
    spec, saves = job.spec.checkpoint, job.saves
    if spec is None or spec.every != "auto" or not questions.undisturbed(context.state, job):
        return None
    saved = saves.checkpoint.step if saves.checkpoint is not None else 0
    if job.committed_step <= saved:
        return None
    # Repeat a request that is not answered in time: workers ignore numbers that they have answered,
    # which may be more than this head knows.
    interval_s = questions.save_interval_s(context.state, job, context.now)
    due = context.now + questions.until_save_s(job, context.now, interval_s)
    if context.now < due:
        return Decision(wake_at=due)
    number = saves.requested + 1
    event = CheckpointRequested(job_id=job.id, request_id=f"auto-{number}", number=number)
    return Decision(
        actions=(event,), reason=f"a checkpoint is due, {interval_s:.0f} s after the last one"
    )


def _event(job: Job, report: SaveReport) -> CheckpointPublished | SaveProblem | JobRestored:
    match report:
        case CheckpointSaved():
            return CheckpointPublished(job_id=job.id, saved=report)
        case SaveFailed():
            return SaveProblem(job_id=job.id, failed=report)
        case Restored(step=step):
            return JobRestored(
                job_id=job.id,
                restored=report,
                resumed=job.current.trained is None and report.job != job.id,
                lost_steps=max(0, job.seen.steps.furthest_step - step),
            )

"""Progress of a job: a generation's first step, repeated steps, checkpoints, and the end.

Workers take checkpoints by themselves, and go back to one by themselves where a part of the model
is with nobody. The master notes each of their words on it once, and tells operators.
"""

from statistics import median

import msgspec

from oobleck.core.ids import NodeName
from oobleck.core.messages import CheckpointSaved, Restored, SaveFailed
from oobleck.core.units import head
from oobleck.host.detection import GATHER_WORDS_S
from oobleck.master.events.jobs import (
    CheckpointPublished,
    JobCancelled,
    JobCaughtUp,
    JobFailed,
    JobRestored,
    JobSucceeded,
    RecordsLost,
    SaveProblem,
)
from oobleck.master.events.plans import PHASES, FirstStepCommitted, ReconfigurationStats
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.evidence import carried
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import SaveReport


def reconfiguration_stats(context: Context, job: Job) -> ReconfigurationStats | None:
    """Return statistics of the transition into the newest generation so far; None: none is under
    way."""
    if job.current.made is None or not job.current.on_the_way:
        return None
    stats = _observed_stats(context, job, job.current.made.detect_s)
    return msgspec.structs.replace(stats, stall_s=_stall_s(job))


def _stall_s(job: Job) -> float | None:
    """Return the seconds without a committed step before the newest generation's first one, less
    one usual step; None: it has no step yet, or no earlier one is known."""
    recent, generation = job.seen.steps.recent, job.current.generation
    before = [record for record in recent if record.generation < generation]
    if not before and job.seen.steps.last_before is not None:
        before = [job.seen.steps.last_before]  # many steps may be told of at once
    first = next((record for record in recent if record.generation >= generation), None)
    if first is None or not before:
        return None
    usual_s = median(record.step_seconds for record in before)
    return max(0.0, first.time - before[-1].time - usual_s)


def _observed_stats(context: Context, job: Job, detect_s: float) -> ReconfigurationStats:
    timeline = job.seen.timeline
    if timeline is not None:
        end = context.now if timeline.first_step_at is None else timeline.first_step_at
        return timeline.stats(end, job.unanswered())
    # Another master process made the plan, and only the calendar spans both.
    unix = job.seen.since_unix + (context.now - job.seen.since)
    first = next(
        (r.time for r in job.seen.steps.recent if r.generation >= job.current.generation), unix
    )
    phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    phases["detect"], phases["waiting"] = detect_s, job.current.waited_s
    phases["first_step"] = max(0.0, first - job.current.made_at)
    return ReconfigurationStats(
        phases=phases,
        total_s=sum(phases.values()),
        redo_step=None,
        rolled_forward=False,
        received_bytes=0,
        master_restarted=True,
    )


def first_step(context: Context, job: Job) -> Decision | None:
    if not job.current.on_the_way:
        return None
    step = next(
        (r.step for r in job.seen.steps.recent if r.generation >= job.current.generation), None
    )
    if step is None and job.seen.steps.redone is not None:
        generation, first, last = job.seen.steps.redone
        step = last if generation == job.current.generation and last > first else None
    how = reconfiguration_stats(context, job)
    if step is None or how is None:
        return None
    if (due := _told_by(context, job)) > context.now:
        return Decision(wake_at=due, reason="workers have not told yet how they came here")
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


def _told_by(context: Context, job: Job) -> float:
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
    return timeline.first_step_at + GATHER_WORDS_S


def caught_up(context: Context, job: Job) -> Decision | None:
    """The steps that were lost with the way back to a checkpoint are committed again."""
    if not job.rollback.redo_until or job.seen.steps.furthest_step < job.redone_until:
        return None
    event = JobCaughtUp(job_id=job.id, step=job.seen.steps.furthest_step)
    return Decision(actions=(event,), reason=f"step {event.step} is committed again")


def end_jobs(context: Context) -> Decision | None:
    for job in context.state.jobs.values():
        if job.cancel_requested and job.finished_at == 0.0:
            event = JobCancelled(job_id=job.id, transition=reconfiguration_stats(context, job))
            return Decision(actions=(event,), reason="the operator cancelled the job")
    active = context.state.job
    if active is None:
        return None
    return _succeed(context, active)


def fail(context: Context, job: Job, reason: str, node: NodeName | None = None) -> Decision:
    """The end of a job that cannot go on; `node`: which alone is at fault."""
    reason = head(reason)
    event = JobFailed(
        job_id=job.id,
        reason=reason,
        node=node,
        transition=reconfiguration_stats(context, job),
        evidence=carried(job, context.now),
    )
    return Decision(actions=(event,), reason=reason)


def _succeed(context: Context, job: Job) -> Decision | None:
    if not job.all_finished():
        return None
    steps, through = job.spec.training.steps, job.seen.steps.committed_step
    if through < steps or _lacks_evaluations(job):
        missing = f"all workers have finished; the records of steps {through + 1} to {steps} lack"
        if through == steps:
            missing = "all workers have finished; the last evaluation lacks"
        if not all(context.state.nodes[name].connected for name in job.current.members):
            return Decision(reason=missing)
        if job.seen.steps.records_wait:
            return Decision(reason=missing)
        # The agents send what they have as soon as they are connected.
        last = max(job.seen.progressed_at or context.now, job.seen.steps.recorded_at or 0.0)
        if context.now < (due := last + context.timing.meeting_s):
            return Decision(wake_at=due, reason=missing)
    # A master that ended before it wrote the records behind them has told of these.
    told = max((one.last for one in job.lost.last), default=0)
    first = max(through, told) + 1
    lost = (records_lost(job, range(first, steps + 1)),) if first <= steps else ()
    event = JobSucceeded(job_id=job.id, transition=reconfiguration_stats(context, job))
    return Decision(actions=(*lost, event), reason="all workers have finished")


def _lacks_evaluations(job: Job) -> bool:
    """Return whether the evaluation after the last step has not come."""
    newest = job.seen.steps.evaluation
    wanted = job.spec.evaluation is not None
    return wanted and (newest is None or newest.step < job.spec.training.steps)


def records_lost(job: Job, steps: range) -> RecordsLost:
    """Return the word on records that nobody has sent, with why, as far as that is known."""
    why, restored = "nobody who is connected has them", job.rollback.restored
    if restored is not None and steps.start <= restored.step:
        what = restored.records_problem or "there are none"
        why = f"all who had them have ended; beside the checkpoint of {restored.step}: {what}"
    return RecordsLost(job_id=job.id, first=steps.start, last=steps.stop - 1, why=why)


def note_checkpoint(context: Context) -> Decision | None:
    for job in context.state.jobs.values():
        if (report := job.due_report()) is not None:
            event = _event(job, report)
            return Decision(actions=(event,), reason="a worker told of a checkpoint")
    return None


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

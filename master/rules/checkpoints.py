"""What becomes of the workers' words on checkpoints: each is noted once, as an event.

The workers take checkpoints by themselves, and a part of the model that is with nobody makes them
go back to one (`oobleck.master.rules.replan`); the master remembers what there is, and tells
operators.
"""

from oobleck.host.ipc.messages import CheckpointSaved, Restored, SaveFailed
from oobleck.master.events.jobs import CheckpointPublished, JobRestored, SaveProblem
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import SaveReport

_Event = CheckpointPublished | SaveProblem | JobRestored


def note(context: Context) -> Decision | None:
    """Before all that depends on how far a job is."""
    for job in context.state.jobs.values():
        if job.seen.save_reports:
            event = _event(job, job.seen.save_reports[0])
            return Decision(actions=(event,), reason="a worker told of a checkpoint")
    return None


def _event(job: Job, report: SaveReport) -> _Event:
    match report:
        case CheckpointSaved():
            return CheckpointPublished(job_id=job.id, saved=report)
        case SaveFailed():
            return SaveProblem(job_id=job.id, failed=report)
        case Restored(step=step):
            return JobRestored(
                job_id=job.id,
                restored=report,
                resumed=job.trained is None,
                lost_steps=max(0, job.seen.steps.furthest_step - step),
            )

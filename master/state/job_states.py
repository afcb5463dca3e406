"""States of a job, and the events that change them.

    queued --JobStarted--> starting --FirstStepCommitted--> running
    running --a loss or PlanMade--> reconfiguring --FirstStepCommitted--> running
    starting, running, reconfiguring --JobWaiting--> waiting for nodes
    waiting for nodes --JobPutBack--> queued
    starting, running, reconfiguring --JobPutBack (its nodes train another job)--> queued
    waiting for nodes --JobStarted (no plan yet)--> starting, --PlanMade--> reconfiguring
    any of them --JobSucceeded, JobFailed, JobCancelled--> succeeded, failed, cancelled

A `starting` job is `profiling` from MeasuringStarted to ProfileChosen, and may go from there to
waiting, failed and cancelled too. It stays `starting` until a step of its first plans is committed,
and `reconfiguring` until one of the newest plan is. The record of that step may arrive late: if a
loss has been declared already, the job does not become `running` by it. Losses count only where
they hit the newest plan. An event that the table does not allow is a bug.

Owns the losses of a job, too. Must not know what else an event changes.
"""

from collections.abc import Mapping

from oobleck.master.events.jobs import (
    FirstStepCommitted,
    JobCancelled,
    JobFailed,
    JobPutBack,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    MeasuringStarted,
    PlanMade,
    ProfileChosen,
)
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeReset,
    WorkerLost,
)
from oobleck.master.events.unions import Journaled
from oobleck.master.state.job import DeclaredLoss, Job, JobState
from oobleck.master.state.job_observed import LossSeen

TRANSITIONS: Mapping[tuple[JobState, type[Journaled]], JobState] = {
    ("queued", JobStarted): "starting",
    ("queued", JobCancelled): "cancelled",
    ("starting", JobWaiting): "waiting for nodes",
    ("starting", MeasuringStarted): "profiling",
    ("starting", ProfileChosen): "starting",
    ("starting", PlanMade): "starting",
    ("starting", FirstStepCommitted): "running",
    ("starting", NodeLost): "starting",
    ("starting", WorkerLost): "starting",
    ("starting", NodeLeftOut): "starting",
    ("starting", NodeReset): "starting",
    ("starting", NodeDrained): "starting",
    ("starting", JobPutBack): "queued",
    ("starting", JobSucceeded): "succeeded",
    ("starting", JobFailed): "failed",
    ("starting", JobCancelled): "cancelled",
    ("profiling", JobWaiting): "waiting for nodes",
    ("profiling", MeasuringStarted): "profiling",
    ("profiling", ProfileChosen): "starting",
    ("profiling", JobPutBack): "queued",
    ("profiling", JobFailed): "failed",
    ("profiling", JobCancelled): "cancelled",
    ("running", PlanMade): "reconfiguring",
    ("running", NodeLost): "reconfiguring",
    ("running", WorkerLost): "reconfiguring",
    ("running", NodeLeftOut): "reconfiguring",
    ("running", NodeReset): "reconfiguring",
    ("running", NodeDrained): "reconfiguring",
    ("running", JobWaiting): "waiting for nodes",
    ("running", JobPutBack): "queued",
    ("running", JobSucceeded): "succeeded",
    ("running", JobFailed): "failed",
    ("running", JobCancelled): "cancelled",
    ("reconfiguring", JobWaiting): "waiting for nodes",
    ("reconfiguring", PlanMade): "reconfiguring",
    ("reconfiguring", FirstStepCommitted): "running",
    ("reconfiguring", NodeLost): "reconfiguring",
    ("reconfiguring", WorkerLost): "reconfiguring",
    ("reconfiguring", NodeLeftOut): "reconfiguring",
    ("reconfiguring", NodeReset): "reconfiguring",
    ("reconfiguring", NodeDrained): "reconfiguring",
    ("reconfiguring", JobPutBack): "queued",
    ("reconfiguring", JobSucceeded): "succeeded",
    ("reconfiguring", JobFailed): "failed",
    ("reconfiguring", JobCancelled): "cancelled",
    ("waiting for nodes", JobStarted): "starting",
    ("waiting for nodes", JobPutBack): "queued",
    ("waiting for nodes", JobWaiting): "waiting for nodes",
    ("waiting for nodes", PlanMade): "reconfiguring",
    ("waiting for nodes", FirstStepCommitted): "waiting for nodes",
    ("waiting for nodes", NodeLost): "waiting for nodes",
    ("waiting for nodes", WorkerLost): "waiting for nodes",
    ("waiting for nodes", NodeLeftOut): "waiting for nodes",
    ("waiting for nodes", NodeDrained): "waiting for nodes",
    ("waiting for nodes", JobSucceeded): "succeeded",
    ("waiting for nodes", JobFailed): "failed",
    ("waiting for nodes", JobCancelled): "cancelled",
}


class InvalidTransition(Exception):
    """Failure: the job's state does not allow the event."""

    def __init__(self, job: Job, event: Journaled) -> None:
        super().__init__(
            f"job {job.id} is {job.state} and got {type(event).__name__}; "
            f"before: {', '.join(job.history) or 'nothing'}"
        )


def move(job: Job, event: Journaled) -> None:
    """Bring the job into the state that `event` leads to. Raises InvalidTransition."""
    to = TRANSITIONS.get((job.state, type(event)))
    if to is None:
        raise InvalidTransition(job, event)
    if to == "running" and job.current.losses:
        to = "reconfiguring"
    job.history.append(f"{job.state} --{type(event).__name__}--> {to}")
    if to != job.state:
        job.state, job.reason = to, ""


def lose(job: Job, loss: DeclaredLoss, now: float, *, detect_s: float = 0.0) -> None:
    """Note a loss of the job's newest plan that no plan has answered yet."""
    move(job, loss)
    job.current.losses = (*job.current.losses, loss)
    note_loss(job, now, detect_s=detect_s)


def note_loss(job: Job, now: float, *, detect_s: float = 0.0) -> None:
    """Note that a loss is declared now, with the first evidence `detect_s` before."""
    first = now - detect_s
    known = job.seen.loss
    job.seen.loss = LossSeen(first if known is None else min(known.evidence_at, first), now)

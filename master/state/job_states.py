"""States of a job, and the events that change them.

A `starting` job is `profiling` from MeasuringStarted to ProfileChosen. It stays `starting` until a
step of its first plans is committed, and `reconfiguring` until one of the newest plan is. The
record of that step may arrive late: if a loss has been declared meanwhile, it does not make the job
`running`. Losses count only where they hit the newest plan. An event that the table does not allow
is a bug.

Owns the losses of a job, too. Must not know what else an event changes.
"""

from collections.abc import Iterable, Mapping
from typing import get_args

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
from oobleck.master.events.nodes import NodeReset
from oobleck.master.events.unions import Journaled
from oobleck.master.state.job import DeclaredLoss, Job, JobState
from oobleck.master.state.job_observed import LossSeen

_LOSSES: tuple[type[Journaled], ...] = get_args(DeclaredLoss)


def _all_to(
    state: JobState, events: Iterable[type[Journaled]] = _LOSSES
) -> Mapping[type[Journaled], JobState]:
    return dict.fromkeys(events, state)


#: Events that any unfinished job may get, except that a job that is being measured cannot succeed.
_AT_ANY_TIME: Mapping[type[Journaled], JobState] = {
    JobWaiting: "waiting for nodes",
    JobPutBack: "queued",
    JobSucceeded: "succeeded",
    JobFailed: "failed",
    JobCancelled: "cancelled",
}
TRANSITIONS: Mapping[JobState, Mapping[type[Journaled], JobState]] = {
    "queued": {JobStarted: "starting", JobCancelled: "cancelled"},
    "starting": {
        **_AT_ANY_TIME,
        **_all_to("starting"),
        MeasuringStarted: "profiling",
        ProfileChosen: "starting",
        PlanMade: "starting",
        FirstStepCommitted: "running",
    },
    "profiling": {
        **{event: to for event, to in _AT_ANY_TIME.items() if event is not JobSucceeded},
        MeasuringStarted: "profiling",
        ProfileChosen: "starting",
    },
    "running": {
        **_AT_ANY_TIME,
        **_all_to("reconfiguring"),
        PlanMade: "reconfiguring",
    },
    "reconfiguring": {
        **_AT_ANY_TIME,
        **_all_to("reconfiguring"),
        PlanMade: "reconfiguring",
        FirstStepCommitted: "running",
    },
    "waiting for nodes": {
        **_AT_ANY_TIME,
        # Not NodeReset: it needs a rendezvous of the others, and there is none.
        **_all_to("waiting for nodes", (loss for loss in _LOSSES if loss is not NodeReset)),
        JobStarted: "starting",
        PlanMade: "reconfiguring",
        FirstStepCommitted: "waiting for nodes",
    },
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
    to = TRANSITIONS.get(job.state, {}).get(type(event))
    if to is None:
        raise InvalidTransition(job, event)
    if to == "running" and job.current.losses:
        to = "reconfiguring"
    job.history.append(f"{job.state} --{type(event).__name__}--> {to}")
    if to != job.state:
        job.state, job.reason = to, ""


def lose(job: Job, loss: DeclaredLoss, now: float, *, detect_s: float = 0.0) -> None:
    """Add a loss to those of the newest plan that no plan has answered yet."""
    move(job, loss)
    job.current.losses = (*job.current.losses, loss)
    note_loss(job, now, detect_s=detect_s)


def note_loss(job: Job, now: float, *, detect_s: float = 0.0) -> None:
    """Note that a loss is declared now, with its first evidence `detect_s` before."""
    first = now - detect_s
    known = job.seen.loss
    job.seen.loss = LossSeen(first if known is None else min(known.evidence_at, first), now)

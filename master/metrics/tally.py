"""Counts of events since this master started.

Counts begin with the process, as readers of Prometheus' counters expect; the state's history from
before is not counted again. A job's counts are dropped with the job. Must not know how they are
shown.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

from oobleck.core.ids import JobId
from oobleck.host.metrics import LONG_S, Durations
from oobleck.master.events import jobs
from oobleck.master.events.nodes import NodeLost, NodeQuarantined, WorkerLost
from oobleck.master.events.unions import Event, Journaled, Observed, RecordsReceived
from oobleck.master.state.cluster import ClusterState
from oobleck.planner.recovery.answer import Policy

log = logging.getLogger(__name__)


@dataclass(slots=True)
class JobTally:
    """Counts of one job."""

    #: Steps with records (each counted once), their tokens, and their seconds.
    steps: int = 0
    tokens: int = 0
    training_s: float = 0.0
    #: Unix time at which the first of these steps began; None: there is none.
    since: float | None = None
    #: Changes of plan that have ended, and the seconds of their phases.
    recoveries: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(jobs.PHASES, 0.0))
    stall_s: float = 0.0
    received_bytes: int = 0
    #: Steps that were begun and done again, or committed and lost on going back to a
    #: checkpoint.
    redone_steps: int = 0
    salvaged_microbatches: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    checkpoint_s: float = 0.0
    save_failures: int = 0
    workers_lost: int = 0


class Tally:
    def __init__(self) -> None:
        self.jobs: dict[JobId, JobTally] = {}
        #: Journaled events by their names.
        self.events: Counter[str] = Counter({event.__name__: 0 for event in get_args(Journaled)})
        #: By cause and policy. All possible series exist from the start: a reader who sees a series
        #: for the first time sees no increase in it.
        self.plans: Counter[tuple[str, str]] = Counter(
            dict.fromkeys(product(get_args(jobs.Cause), get_args(Policy)), 0)
        )
        #: By cause.
        self.nodes_lost: Counter[str] = Counter()
        self.quarantines = 0
        #: Seconds from the first evidence to the first step, by the plan's cause.
        self.reconfigurations = {cause: Durations(LONG_S) for cause in get_args(jobs.Cause)}
        self._failed = False

    def note(self, state: ClusterState, event: Event) -> None:
        """Count `event`, before it changes `state`. Raises nothing: wrong metrics end no master."""
        try:
            self._note(state, event)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("metrics are wrong: an event could not be counted")

    def _note(self, state: ClusterState, event: Event) -> None:
        if not isinstance(event, Observed):
            self.events[type(event).__name__] += 1
        match event:
            case RecordsReceived(job_id=job_id, records=records) if records:
                job = self._job(job_id)
                if job.since is None:
                    job.since = records[0].time - records[0].step_seconds
                job.steps += len(records)
                job.tokens += sum(record.tokens for record in records)
                job.training_s += sum(record.step_seconds for record in records)
            case jobs.JobSubmitted(job_id=job_id) | jobs.JobAdopted(job_id=job_id):
                self._job(job_id)
            case jobs.PlanMade(job_id=job_id, overtaken=stats):
                self.plans[event.cause, event.policy] += 1
                self._reconfigured(state, job_id, stats)
            case (
                jobs.FirstStepCommitted()
                | jobs.JobSucceeded()
                | jobs.JobFailed()
                | jobs.JobCancelled()
            ):
                self._reconfigured(state, event.job_id, event.transition)
            case NodeLost(cause=cause):
                self.nodes_lost[cause] += 1
            case WorkerLost(job_id=job_id):
                self._job(job_id).workers_lost += 1
            case NodeQuarantined():
                self.quarantines += 1
            case jobs.CheckpointPublished(job_id=job_id, saved=saved):
                job = self._job(job_id)
                job.checkpoints += 1
                job.checkpoint_bytes += saved.bytes
                job.checkpoint_s += saved.seconds
            case jobs.SaveProblem(job_id=job_id):
                self._job(job_id).save_failures += 1
            case jobs.JobRestored(job_id=job_id, lost_steps=lost_steps):
                self._job(job_id).redone_steps += lost_steps
            case jobs.JobForgotten(job_id=job_id):
                self.jobs.pop(job_id, None)
            case _:
                pass

    def _job(self, job_id: JobId) -> JobTally:
        return self.jobs.setdefault(job_id, JobTally())

    def _reconfigured(
        self, state: ClusterState, job_id: JobId, stats: jobs.ReconfigurationStats | None
    ) -> None:
        """Count the end of the change to the newest generation, unless that is the first one."""
        known = state.jobs[job_id]
        made = known.current.made
        if stats is None or made is None or known.lineage.before is None:
            return
        job = self._job(job_id)
        job.recoveries += 1
        for phase, seconds in stats.phases.items():
            job.phases[phase] += seconds
        job.stall_s += stats.stall_s or 0.0
        job.received_bytes += stats.received_bytes
        job.redone_steps += stats.redo_step is not None
        job.salvaged_microbatches += stats.salvaged_microbatches
        self.reconfigurations[made.cause].add(stats.total_s)

"""Rates of slow workers after an event: what is known of a process is forgotten with it.

Pure. Called before the event changes the state, so that an incident of slow workers and its line in
events.jsonl can tell the end from the event alone. Must not know how a worker is found slow.
"""

from collections.abc import Callable

from oobleck.core.ids import Incarnation, JobId, WorkerId
from oobleck.master.events.jobs import JobEnded, JobPutBack, RateChanged
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeRegistered,
    NodeReset,
    WorkerLost,
)
from oobleck.master.events.plans import PlanMade
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job

#: Whether a worker's process is gone, or about to go.
Gone = Callable[[WorkerId, Incarnation], bool]


def concerned(state: ClusterState, event: Journaled) -> Job | None:
    """The job whose workers' paces `event` may change: if it names none, the one with the turn."""
    named: JobId | None = getattr(event, "job_id", None)
    job_id = named if named is not None else state.active
    return state.jobs.get(job_id) if job_id is not None else None


def slow_after(state: ClusterState, job: Job, event: Journaled) -> dict[WorkerId, RateChanged]:
    """The slow workers of `job`, which `event` concerns."""
    if isinstance(event, RateChanged):
        if event.rate < 1:
            return {**job.slow, event.worker: event}
        return {worker: told for worker, told in job.slow.items() if worker != event.worker}
    return _without(job, gone_with(state, event)) if job.slow else {}


def forget(state: ClusterState, event: Journaled) -> None:
    """Forget rates and stand-by records of the processes that are gone with `event`."""
    job = concerned(state, event)
    if job is None or not (job.slow or job.stand_bys):
        return
    gone = gone_with(state, event)
    job.slow = _without(job, gone)
    job.stand_bys = {w: one for w, one in job.stand_bys.items() if not gone(w, one.process)}


def _without(job: Job, gone: Gone) -> dict[WorkerId, RateChanged]:
    return {w: told for w, told in job.slow.items() if not gone(w, told.incarnation)}


def gone_with(state: ClusterState, event: Journaled) -> Gone:
    match event:
        case WorkerLost(worker=lost):
            return lambda worker, _: worker == lost
        case NodeRegistered():
            known = state.nodes.get(event.facts.node)
            same = known is None or known.facts.incarnation == event.facts.incarnation
            name = "" if same and not event.stale_workers else event.facts.node
            return lambda worker, _: worker.node == name  # workers end with their agent
        case NodeLost() | NodeDrained() | NodeLeftOut() | NodeReset():
            name = event.node
            return lambda worker, _: worker.node == name
        case PlanMade():
            processes = dict(zip(event.plan.workers, event.incarnations, strict=True))
            return lambda worker, process: processes.get(worker, process) != process
        case event if isinstance(event, JobPutBack | JobEnded):
            return lambda *_: True
        case _:
            return lambda *_: False

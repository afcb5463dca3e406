"""Slow workers, updated by each event: their rates, and the slowdown that lasts until none is slow.

Pure. Called before the event changes the state, so that a slowdown and its line in events.jsonl
follow from the event alone. A rate is forgotten with its process. Must not know how a worker is
found slow, nor how events.jsonl describes it.
"""

from collections.abc import Callable

from msgspec.structs import replace

from oobleck.core.ids import Incarnation, JobId, WorkerId
from oobleck.master.events import jobs, nodes
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incident import (
    MOST_KEPT,
    Answer,
    Slowdown,
    SlowWorker,
    ranks_of,
    with_stats,
)
from oobleck.master.state.job import Job

#: Returns whether a worker's process is gone, or about to end.
Gone = Callable[[WorkerId, Incarnation], bool]
#: Causes of plans that answer changed rates.
_CAUSES: tuple[jobs.Cause, ...] = ("worker slow", "worker well")


def concerned_job(state: ClusterState, event: Journaled) -> Job | None:
    """Return the job whose workers' rates `event` may change: the named one, else the active
    one."""
    named: JobId | None = getattr(event, "job_id", None)
    job_id = named if named is not None else state.active
    return state.jobs.get(job_id) if job_id is not None else None


def slow_after(state: ClusterState, job: Job, event: Journaled) -> dict[WorkerId, jobs.RateChanged]:
    """Return the slow workers of `job` after `event`, which concerns it."""
    if isinstance(event, jobs.RateChanged):
        if event.rate < 1:
            return {**job.slow, event.worker: event}
        return {worker: change for worker, change in job.slow.items() if worker != event.worker}
    return _without(job, gone_with(state, event)) if job.slow else {}


def forget_slow(state: ClusterState, event: Journaled) -> None:
    """Forget rates and stand-by records of the processes that are gone with `event`."""
    job = concerned_job(state, event)
    if job is None or not (job.slow or job.stand_bys):
        return
    gone = gone_with(state, event)
    job.slow = _without(job, gone)
    job.stand_bys = {w: one for w, one in job.stand_bys.items() if not gone(w, one.process)}


def _without(job: Job, gone: Gone) -> dict[WorkerId, jobs.RateChanged]:
    return {w: change for w, change in job.slow.items() if not gone(w, change.incarnation)}


def gone_with(state: ClusterState, event: Journaled) -> Gone:
    match event:
        case nodes.WorkerLost(worker=lost):
            return lambda worker, _: worker == lost
        case nodes.NodeRegistered():
            known = state.nodes.get(event.facts.node)
            same = known is None or known.facts.incarnation == event.facts.incarnation
            name = "" if same and not event.stale_workers else event.facts.node
            return lambda worker, _: worker.node == name  # workers end with their agent
        case nodes.NodeLost() | nodes.NodeDrained() | nodes.NodeLeftOut() | nodes.NodeReset():
            name = event.node
            return lambda worker, _: worker.node == name
        case jobs.PlanMade():
            processes = dict(zip(event.plan.workers, event.incarnations, strict=True))
            return lambda worker, process: processes.get(worker, process) != process
        case event if isinstance(event, jobs.JobPutBack | jobs.JobEnded):
            return lambda *_: True
        case _:
            return lambda *_: False


def slowdown_after(
    state: ClusterState, event: Journaled, unix: float
) -> tuple[Job, Slowdown] | None:
    """Return the job of `event` and its slowdown updated by the event; None: it changes none."""
    job = concerned_job(state, event)
    if job is None or (job.slowdown is None and not isinstance(event, jobs.RateChanged)):
        return None
    workers = _workers(state, job, event, unix)
    if not workers:
        return None
    slowdown = job.slowdown or Slowdown(
        number=job.incidents + 1, from_generation=job.current.generation
    )
    answers = _answers(job, slowdown.answers, event, unix)
    return job, replace(slowdown, workers=workers, answers=answers)


def _workers(
    state: ClusterState, job: Job, event: Journaled, unix: float
) -> tuple[SlowWorker, ...]:
    known = {one.worker: one for one in job.slowdown.workers} if job.slowdown is not None else {}
    slow = slow_after(state, job, event)
    known |= {
        change.worker: _slow(job, known.get(change.worker), change, unix)
        for change in slow.values()
    }
    well = isinstance(event, jobs.RateChanged) and event.is_measured
    ended = {
        one.worker: one if one.until else replace(one, until=unix, well=well)
        for one in known.values()
        if one.worker not in slow
    }
    for worker in list(ended)[:-MOST_KEPT]:
        del known[worker]
    return tuple(ended.get(worker, one) for worker, one in known.items())


def _slow(job: Job, known: SlowWorker | None, change: jobs.RateChanged, unix: float) -> SlowWorker:
    if known is None:
        return SlowWorker(
            worker=change.worker,
            ranks=ranks_of(job.current.made, change.worker.node, change.worker),
            slowest=change,
            since=unix - change.seconds,
            told_at=unix,
        )
    slowest = min(known.slowest, change, key=lambda one: one.rate)
    return replace(known, slowest=slowest, until=0.0, well=False)


def _answers(
    job: Job, known: tuple[Answer, ...], event: Journaled, unix: float
) -> tuple[Answer, ...]:
    match event:
        case jobs.PlanMade():
            known = with_stats(known, job.current.generation, event.overtaken, unix)
            if event.cause not in _CAUSES:
                return known
            answer = Answer(
                generation=event.plan.generation,
                cause=event.cause,
                rule=event.rule,
                policy=event.policy,
                reason=event.reason,
            )
            return (*known, answer)[-MOST_KEPT:]
        case event if isinstance(event, jobs.FirstStepCommitted | jobs.JobEnded):
            return with_stats(known, job.current.generation, event.transition, unix)
        case _:
            return known

"""Follows a slowdown from the first worker that is found slow until none is.

Like `oobleck.master.state.incidents.incidents` it follows from journaled events alone, looks at the
state that an event finds, and must not know how events.jsonl tells of it.
"""

from msgspec.structs import replace

from oobleck.master.events.jobs import JobEnded, RateChanged
from oobleck.master.events.plans import Cause, FirstStepCommitted, PlanMade
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incidents.incidents import ranks_of, with_stats
from oobleck.master.state.incidents.slowdown import MOST_KEPT, Answer, Slowdown, SlowWorker
from oobleck.master.state.job import Job
from oobleck.master.state.rates import concerned, slow_after

#: Of plans that answer how fast workers are.
_CAUSES: tuple[Cause, ...] = ("worker slow", "worker well")


def slowdown_after(
    state: ClusterState, event: Journaled, unix: float
) -> tuple[Job, Slowdown] | None:
    """The job that `event` is about and its slowdown with what the event adds, which may be over
    with it; None: there is none."""
    job = concerned(state, event)
    if job is None or (job.slowdown is None and not isinstance(event, RateChanged)):
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
    known |= {told.worker: _slow(job, known.get(told.worker), told, unix) for told in slow.values()}
    well = isinstance(event, RateChanged) and event.is_measured
    ended = {
        one.worker: one if one.until else replace(one, until=unix, well=well)
        for one in known.values()
        if one.worker not in slow
    }
    for worker in list(ended)[:-MOST_KEPT]:
        del known[worker]
    return tuple(ended.get(worker, one) for worker, one in known.items())


def _slow(job: Job, known: SlowWorker | None, told: RateChanged, unix: float) -> SlowWorker:
    if known is None:
        return SlowWorker(
            worker=told.worker,
            ranks=ranks_of(job, told.worker.node, told.worker),
            slowest=told,
            since=unix - told.seconds,
            told_at=unix,
        )
    slowest = min(known.slowest, told, key=lambda one: one.rate)
    return replace(known, slowest=slowest, until=0.0, well=False)


def _answers(
    job: Job, known: tuple[Answer, ...], event: Journaled, unix: float
) -> tuple[Answer, ...]:
    match event:
        case PlanMade():
            known = with_stats(job, known, event.overtaken, unix)
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
        case event if isinstance(event, FirstStepCommitted | JobEnded):
            return with_stats(job, known, event.transition, unix)
        case _:
            return known

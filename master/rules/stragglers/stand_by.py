"""Stand-by times: how long a slow worker must stand by before it may be called better.

The first stand-by lasts until the worker is measured. Measured alone, it may look well though it is
slow in training. So a process that is put to stand by again, within an hour after its rate got
better, must do so for twice as long as before. Must not know how a worker is found slow.
"""

from collections.abc import Iterator

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.master.events.plans import StandByFor
from oobleck.master.rules.decision import Context
from oobleck.master.state.job import Job

#: Nobody must for longer, seconds.
LONGEST_S = 3600.0
#: Who has been better for so long is put to stand by as if it were the first time.
FORGET_S = 3600.0


def taken_out(context: Context, job: Job, plan: Plan) -> Iterator[StandByFor]:
    """Slow workers of the newest plan that `plan` leaves out, and how long each must stand by."""
    before, lost = job.current.processes(), job.current.lost_nodes
    for worker, told in sorted(job.slow.items()):
        if worker in before and worker.node not in plan.nodes and worker.node not in lost:
            yield StandByFor(
                worker=worker,
                incarnation=told.incarnation,
                seconds=_seconds(context, job, worker),
            )


def _seconds(context: Context, job: Job, worker: WorkerId) -> float:
    last = job.stand_bys.get(worker)
    if last is None or last.process != job.slow[worker].incarnation:
        return 0.0
    better_at = job.seen.stand_by_times[worker].better_at
    if better_at is None:  # it was needed, as slow as it was
        return last.seconds
    if context.now > better_at + FORGET_S:
        return 0.0
    return min(LONGEST_S, 2 * max(last.seconds, context.timing.stand_by_s))


def until(job: Job, worker: WorkerId) -> float:
    """Return when the worker may be called better, by this master's clock; 0: at any time."""
    last, told = job.stand_bys.get(worker), job.slow.get(worker)
    if last is None or told is None or last.process != told.incarnation:
        return 0.0
    return job.seen.stand_by_times[worker].until


def next_until(context: Context, job: Job) -> float | None:
    """Return when the next stand-by worker may be called better; None: all may, or none stands
    by."""
    due = (until(job, worker) for worker in job.slow if not job.current.has_member(worker.node))
    return min((at for at in due if at > context.now), default=None)

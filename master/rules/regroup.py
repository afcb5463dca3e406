"""Meetings that follow each other without a step in between: how soon, and when it is enough.

Workers that lost each other though nobody is missing meet anew. Most often that helps; where it
does not, the network between them may be gone for a while, and only time helps. So they meet at
ever longer intervals, and the job fails only where many meetings and a long time have led to no
step. Pure.
"""

from dataclasses import replace

from oobleck.host.detection import Detection
from oobleck.master.events.plans import Cause
from oobleck.master.rules.completion import fail
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.plan_event import next_generation, plan_made
from oobleck.master.state.job import Job
from oobleck.planner.ids import WorkerId

#: Meetings without a step, the least number that a job may fail after.
_ENOUGH = 5
#: Of the interval; enough for any that is worth waiting for.
_MOST_DOUBLINGS = 20


def first_peer_lost(job: Job) -> tuple[float, WorkerId, str] | None:
    """When the newest generation first lost touch, who said so, and how."""
    reports = ((at, worker, lost.detail) for worker, (at, lost) in job.seen.peers_lost.items())
    return min(reports, default=None)


def interval_s(job: Job, timing: Detection) -> float:
    """How long after they lost each other the workers meet again."""
    if job.newcomers:  # which are left out where a meeting with them has failed
        return timing.regroup_s
    longest = max(timing.regroup_s, timing.longest_regroup_s)
    doublings = min(_MOST_DOUBLINGS, max(0, job.seen.since_step.regroups - 1))
    return min(longest, timing.regroup_s * float(2**doublings))


def told_in(job: Job, timing: Detection, now: float) -> str:
    """For the operator: that and when the workers meet again; empty: not to be expected."""
    if job.made is None or job.losses or (first := first_peer_lost(job)) is None:
        return ""
    at, worker, detail = first
    left_s = max(0.0, at + interval_s(job, timing) - now)
    before = (
        f", meeting {job.seen.since_step.regroups + 1} since the last step"
        if job.seen.since_step.regroups
        else ""
    )
    return f"{worker} lost a peer: {detail}; the workers meet again in {left_s:.0f} s{before}"


def again(context: Context, job: Job, *, cause: Cause, reason: str, detect_s: float) -> Decision:
    """The workers of the newest plan meet anew, in the next generation, or that was enough."""
    if (end := enough(context, job, reason)) is not None:
        return end
    assert job.made is not None, "only asked of a job with a plan"
    event = plan_made(
        context,
        job,
        replace(job.made.plan, generation=next_generation(context, job)),
        boundary=False,
        cause=cause,
        rule="regroup",
        reason=reason,
        detect_s=detect_s,
    )
    return Decision(actions=(event,), reason=reason)


def enough(context: Context, job: Job, reason: str) -> Decision | None:
    """The job's end, in place of one more meeting; None: they shall meet again.

    `reason`: why they would have to.
    """
    since, regroups = job.seen.since_step.fruitless_since, job.seen.since_step.regroups
    if since is None or regroups < _ENOUGH or context.now < since + context.timing.fruitless_s:
        return None
    return fail(
        context,
        job,
        f"the workers have met {regroups} times in {context.now - since:.0f} s without a committed "
        f"step between: {reason}",
    )

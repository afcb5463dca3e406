"""What the master's assignments say: what this node shall do, and what it says that it runs.

Pure. Must not know streams.
"""

import functools

import msgspec

from oobleck.agent.desired import Desired, PlanPart
from oobleck.planner.job.file import parse_job
from oobleck.planner.job.spec import JobSpec
from oobleck.proto.types import Assignment


def newest_plan(known: Assignment | None, told: Assignment) -> Assignment | None:
    """What this agent says that it runs, after the master has `told` it something: a master whose
    journal lost its end may tell of an older plan than the workers have."""
    if told.job_id is None:
        return None
    if known is not None and known.job_id != told.job_id:
        known = None
    if told.plan is None:
        return known
    before = known.plan.generation if known is not None and known.plan is not None else 0
    if told.plan.generation < before:
        return known
    return msgspec.structs.replace(told, job="")


def desired_of(assignment: Assignment) -> Desired | None:
    """None: no job. Raises ValueError where the job cannot be read."""
    if assignment.job_id is None:
        return None
    part = None
    if assignment.plan is not None and assignment.rendezvous is not None:
        part = PlanPart(
            plan=assignment.plan,
            rendezvous=assignment.rendezvous,
            boundary=assignment.boundary,
            worker_incarnations=assignment.worker_incarnations,
            restore=assignment.restore,
            anew=assignment.anew,
            leaving=assignment.leaving,
            handover=assignment.handover,
            data=assignment.data,
        )
    return Desired(
        job_id=assignment.job_id,
        job=_job(assignment.job),
        part=part,
        measure=assignment.measure,
        save=assignment.save,
    )


@functools.lru_cache(maxsize=4)
def _job(text: str) -> JobSpec:
    """Every assignment repeats the job's text; reading it takes milliseconds of a recovery."""
    return parse_job(text)

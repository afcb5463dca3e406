"""Rules about turns: one job trains at a time, in the order of submission, and who steps aside.

A job that nothing was trained of yet and that the nodes are too few for does not keep others from
training: it gives its turn to the first job after it that could start on the nodes that there are
(backfilling, as batch schedulers call it), and is asked again first when that one has ended. A job
that was trained keeps its turn, since its state is in its workers' memory. No job is interrupted
for another one.
"""

from oobleck.master import planning, versions
from oobleck.master.decision import Decision, Look
from oobleck.master.job import Job
from oobleck.master.jobevents import JobPutBack, JobStarted
from oobleck.master.state import ClusterState
from oobleck.planner.errors import PlanInfeasible


def next_job(look: Look) -> Decision | None:
    state = look.state
    if state.active is not None:
        return None
    queued = [job for job in state.jobs.values() if job.state == "queued"]
    if not queued:
        return None
    first = next((job for job in queued if not job.passed_over), queued[0])
    return Decision(actions=(JobStarted(job_id=first.id),), reason=f"it is {first.id}'s turn")


def give_way(look: Look) -> Decision | None:
    state, job = look.state, look.state.job
    if job is None or job.made is not None or job.state != "waiting for nodes":
        return None
    for other in state.jobs.values():
        if other.state == "queued" and not other.passed_over and _fits(state, other):
            event = JobPutBack(job_id=job.id, instead=other.id)
            return Decision(actions=(event,), reason=f"{other.id} can start, {job.id} cannot")
    return None


def _fits(state: ClusterState, job: Job) -> bool:
    """Whether it could start on the nodes that are there, as far as is known."""
    nodes = [node for node in versions.alike(state, job)[0] if node.connected]
    try:
        planning.check_enough(job, nodes)
    except PlanInfeasible:
        return job.profile_only and bool(nodes)
    return True

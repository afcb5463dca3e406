"""Rules about what is known of the past: nodes that are gone for good, jobs that ended long ago.

A cluster whose machines come and go under new names, or that runs thousands of jobs, would have a
state, a journal and lists that grow for ever. A node that an operator has drained is kept: it is to
be drained when it comes back. The files of a job stay. How long and how many `Retention` says.
"""

from collections.abc import Iterator

from oobleck.master.events.jobs import JobForgotten
from oobleck.master.events.nodes import NodeForgotten
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.job import ENDED, Job
from oobleck.planner.ids import NodeName


def forget_nodes(context: Context) -> Decision | None:
    state, now = context.state, context.now
    due = {
        name: node.seen.lost_at + context.retention.node_s
        for name, node in state.nodes.items()
        if not node.registered
        and node.seen.lost_at is not None
        and (node.drain is None or node.drain.by != "operator")
    }
    gone = [name for name, at in due.items() if now >= at]
    if gone:
        needed = {name for job in state.jobs.values() for name in _needed(job)}
        forgotten = tuple(NodeForgotten(node=name) for name in sorted(gone) if name not in needed)
        if forgotten:
            return Decision(actions=forgotten, reason=f"lost for {context.retention.node_s:g} s")
    coming = min((at for at in due.values() if now < at), default=None)
    return Decision(wake_at=coming) if coming is not None else None


def _needed(job: Job) -> Iterator[NodeName]:
    """Nodes of which the job may still ask what they have."""
    if job.state in ENDED:
        return
    for made in (job.made, job.trained):
        if made is not None:
            yield from made.plan.nodes
            yield from (worker.node for worker in made.leaving)
    for plan in (job.lineage.before, *job.lineage.plans.values()):
        if plan is not None:
            yield from plan.nodes
    yield from job.lost_nodes


def forget_jobs(context: Context) -> Decision | None:
    ended = [job for job in context.state.jobs.values() if job.state in ENDED]
    most = context.retention.ended_jobs
    if len(ended) <= most:
        return None
    ended.sort(key=lambda job: job.finished_at)
    forgotten = tuple(JobForgotten(job_id=job.id) for job in ended[:-most])
    return Decision(actions=forgotten, reason=f"the last {most} jobs that ended are known")

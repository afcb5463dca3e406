"""Rules about failures of workers that count: whether the job is at fault, or one node.

The job is, where workers on two nodes say so within an hour (an exception in the model, or a second
time no memory for the same step), or one does and the others cannot go on without its node. So one
node alone ends no job that others can do: it is left out, and another worker meets the same, or
does not.

What a worker found wrong with its host (data that are missing or damaged, a device, a disk) and
ends that nobody explains may be the node's own. The node is left out then, if the others can do it,
and the job fails where most nodes say the same, or processes keep ending on a second node without a
step in between. A job that cannot do without the node waits for another one.
"""

from collections import Counter
from collections.abc import Collection

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.units import comma_separated
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.rules.jobs import stalls
from oobleck.master.rules.jobs.completion import fail
from oobleck.master.rules.nodes import node_faults
from oobleck.master.state.evidence import describe_exit, last_words
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

#: Ends of one worker's processes that may follow each other without a committed step in between.
_MOST_ENDS = 5
#: What workers on two nodes raise within this time is the job's: its code may fail at random.
_ONE_FAULT_S = 3600.0


def fail_job(context: Context, job: Job) -> Decision | None:
    if job.cancel_requested or (reason := _jobs_fault(context, job)) is None:
        return None
    return fail(context, job, reason, _lone_node(job))


def _jobs_fault(context: Context, job: Job) -> str | None:
    """Why the job has failed; None: it has not."""
    accused = _accused(context, job)
    if accused and (len(accused) > 1 or not _is_done_without(context, job, accused)):
        return min(accused.values())[1]
    dying = _dying(job)
    given_up = _given_up(job)
    nodes = {*given_up, *(worker.node for worker in dying)}
    if len(nodes) > 1:
        words = [*dying.values(), *(f"{name}: {why}" for name, why in given_up.items())][-1]
        return f"workers keep ending on {comma_separated(nodes)}: {words}"
    suspects = _suspects(job)
    news = _news(job, suspects)
    if not news:
        return None
    if len(news) <= len(_others(context, job, suspects)):
        return None
    return _told(news)


def _told(said: dict[NodeName, str]) -> str:
    """Describe the error that most nodes report, and which nodes; on a tie, the first one."""
    words = Counter(said.values()).most_common(1)[0][0]
    same = {name for name in said if said[name] == words}
    others = said.keys() - same
    more = f"; something else on {comma_separated(others)}" if others else ""
    return f"{words} (on {comma_separated(same)}{more})"


def _lone_node(job: Job) -> NodeName | None:
    """The only node that there is, where it alone is at fault; None: others could do no better."""
    if job.seen.faults.accused or job.left_out or len(job.seen.faults.ailing) != 1:
        return None
    return next(iter(job.seen.faults.ailing))


def leave_out(context: Context, job: Job) -> Decision | None:
    suspects = _suspects(job)
    news = _news(job, suspects)
    if not news:
        return None
    if (due := _wait_until(context, job, suspects)) is not None:
        return Decision(wake_at=due, reason=f"{', '.join(news)}: {next(iter(news.values()))}")
    nodes = context.state.nodes
    return decide([node_faults.left_out(job, nodes[name], why) for name, why in news.items()])


def _is_done_without(context: Context, job: Job, nodes: Collection[NodeName]) -> bool:
    """Return whether there is somebody else, and after the first plan whether the others can go
    on."""
    if job.current.made is None:
        return bool(_others(context, job, nodes))
    others = {*job.current.members} - {*nodes}
    return bool(others) and stalls.can_spare(context, job, {*nodes})


def _suspects(job: Job) -> dict[NodeName, str]:
    """Nodes that the job may do without, and why."""
    return _ailing(job) | {worker.node: words for worker, words in _dying(job).items()}


def _ailing(job: Job) -> dict[NodeName, str]:
    """Return what is wrong with nodes, or the job, by their own workers' word, the first one
    first."""
    told = job.seen.faults.ailing | job.seen.faults.accused
    found = sorted((at, name, words) for name, (at, words) in told.items())
    return {name: words for _, name, words in found}


def _accused(context: Context, job: Job) -> dict[NodeName, tuple[float, str]]:
    """Return by which nodes' word the job is at fault, as far as that is not too long ago to be one
    fault with what another says now."""
    accused = job.seen.faults.accused
    return {name: told for name, told in accused.items() if context.now < told[0] + _ONE_FAULT_S}


def _dying(job: Job) -> dict[WorkerId, str]:
    """Workers that keep ending without a committed step between."""
    found = {}
    for worker, deaths in sorted(job.seen.since_step.deaths.items()):
        if len(deaths) >= _MOST_ENDS:
            last = deaths[-1]
            words = job.seen.since_step.complaints.get(worker) or last_words(last)
            found[worker] = (
                f"worker {worker} has ended {len(deaths)} times without a committed step between; "
                f"the last time {describe_exit(last)}: {words}"
            )
    return found


def _given_up(job: Job) -> dict[NodeName, str]:
    """Nodes that have trained, whose new processes end before they have a part in a step."""
    trained = job.current.trained.plan.nodes if job.current.trained is not None else ()
    now = {node: node_faults.ends_early(job, node) for node in trained}
    return job.seen.since_step.given_up | {node: why for node, why in now.items() if why}


def _news(job: Job, suspects: dict[NodeName, str]) -> dict[NodeName, str]:
    return {name: words for name, words in suspects.items() if name not in job.left_out}


def _others(context: Context, job: Job, suspects: Collection[NodeName]) -> list[Node]:
    """Nodes that the job has or may get, of which nothing bad is known. One that is away counts
    until it is lost: after a restart of the master the first to come back may be the faulty one."""
    return [node for node in context.state.candidates(job) if node.facts.node not in suspects]


def _wait_until(context: Context, job: Job, suspects: dict[NodeName, str]) -> float | None:
    """Return the time until which to wait for other nodes to report the same error; None: do not
    wait."""
    told = job.seen.faults.ailing | job.seen.faults.accused
    since = [at for name, (at, _) in told.items() if name not in job.left_out]
    if job.current.made is not None:
        due = max(since, default=context.now) + context.timing.join_settle_s
        return due if since and context.now < due else None
    pending = [n for n in _others(context, job, suspects) if not context.state.is_ready(n, job)]
    ends = (
        (context.now if node.seen.assigned_at is None else node.seen.assigned_at)
        + context.timing.start_timeout_s
        for node in pending
    )
    due = max(ends, default=context.now)
    return due if context.now < due else None

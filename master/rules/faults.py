"""Rules about repeated failures: the job's fault or one node's, and the consequences.

The job is at fault if workers on two nodes say so within an hour. They report an exception in the
model, or no memory twice for the same step. One node's report ends it only if the others cannot
continue without that node. Otherwise the node is left out; if the job is at fault, another worker
fails in the same way.

Other errors may be the node's own: data that are missing or damaged, a device, a disk, unexplained
ends. The node is left out if the others can do without it. The job fails if most nodes say the
same, or if processes keep ending on a second node without a step in between.

A node is also left out if it reads other data than the rest, or its processes keep ending before
they join a step. It is let in again when its agent registers anew. A node that fails repeatedly is
put in quarantine, a drain that ends by itself and doubles each time. Nodes are not blamed if most
others fail as often. A job that waits for nodes releases nodes from quarantine.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.units import comma_separated, count
from oobleck.master.events.nodes import NodeQuarantined, NodeReleased
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, decide, fail, left_out
from oobleck.master.rules.next_plan import can_spare
from oobleck.master.rules.questions import OTHER_DATA, ends_early, quarantine_s
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incident import describe_exit, last_words
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

#: Failures within the window after which a node is put in quarantine.
MOST_FAILURES = 5
#: Consecutive failed starts of the process that workers are forked from.
MOST_FAILED_STARTS = 3
#: Consecutive ends of one worker's processes, without a committed step in between.
_MOST_ENDS = 5
#: Seconds within which errors on two nodes are one fault of the job, whose code may fail at random.
_ONE_FAULT_S = 3600.0


def leave_out_unfit(context: Context, job: Job) -> Decision | None:
    """Leave out nodes that cannot take part in the job."""
    state = context.state
    reasons = [(node, _reason(state, job, node)) for node in state.candidates(job)]
    return decide([left_out(job, node, reason) for node, reason in reasons if reason])


def _reason(state: ClusterState, job: Job, node: Node) -> str:
    """Return why the node cannot take part; empty: no reason is known."""
    name = node.facts.node
    if name in job.seen.faults.unfit:
        return job.seen.faults.unfit[name]
    if why := ends_early(job, name):
        return why
    made = job.current.made
    if made is None or not made.data or not state.is_ready(node, job):
        return ""
    return "" if state.data_of(node) == made.data else OTHER_DATA


def put_aside(context: Context) -> Decision | None:
    """Put nodes that fail repeatedly into quarantine."""
    first_s = context.timing.quarantine_s
    return decide(list(_quarantines(context.state, first_s))) if first_s else None


def _quarantines(state: ClusterState, first_s: float) -> Iterator[NodeQuarantined]:
    for name, node in sorted(state.nodes.items()):
        if node.drain is not None:
            continue
        seconds = quarantine_s(node, first_s)
        status = node.seen.status
        if node.connected and status.failed_starts >= MOST_FAILED_STARTS:
            yield NodeQuarantined(
                node=name, reason=status.trouble, seconds=seconds, until_ready=True
            )
        elif len(node.failures.times) >= MOST_FAILURES and not _all_flap(state, node):
            failures = node.failures
            span_s = failures.times[-1] - failures.times[0]
            reason = (
                f"failed {count(len(failures.times), 'time')} in {span_s:.0f} s, the last time: "
                f"{failures.last}"
            )
            yield NodeQuarantined(node=name, reason=reason, seconds=seconds)


def _all_flap(state: ClusterState, node: Node) -> bool:
    """Return whether at least half of the other nodes fail about as often. Then the network or the
    job is at fault, not the node."""
    others = [other for other in state.nodes.values() if other is not node]
    bad = [other for other in others if len(other.failures.times) >= MOST_FAILURES - 1]
    return 2 * len(bad) >= len(others)


def release(context: Context) -> Decision | None:
    """End quarantines that are over, or whose nodes are needed."""
    state, job = context.state, context.state.job
    released: list[NodeReleased] = []
    wake_at: float | None = None
    for name, node in sorted(state.nodes.items()):
        due = node.seen.release_at
        if not node.is_quarantined or due is None or node.drain is None:
            continue
        status = node.seen.status
        starts = not status.trouble and status.failed_starts < MOST_FAILED_STARTS
        healthy = node.connected and starts
        if context.now >= due:
            released.append(NodeReleased(node=name, reason="its time is over"))
        elif healthy and node.drain.until_ready:
            released.append(NodeReleased(node=name, reason="it can start workers again"))
        elif healthy and job is not None and job.state == "waiting for nodes":
            released.append(NodeReleased(node=name, reason=f"job {job.id} waits for nodes"))
        else:
            wake_at = due if wake_at is None else min(wake_at, due)
    return decide(released) or Decision(wake_at=wake_at)


def fail_job(context: Context, job: Job) -> Decision | None:
    """Fail a job that is itself at fault."""
    if job.cancel_requested or (reason := _jobs_fault(context, job)) is None:
        return None
    return fail(context, job, reason, _lone_node(job))


def _jobs_fault(context: Context, job: Job) -> str | None:
    """Return why the job has failed; None: it has not."""
    accused = _accused(context, job)
    if accused and (len(accused) > 1 or not _is_done_without(context, job, accused)):
        return min(accused.values())[1]
    dying = _dying(job)
    given_up = _given_up(job)
    nodes = {*given_up, *(worker.node for worker in dying)}
    if len(nodes) > 1:
        error = [*dying.values(), *(f"{name}: {why}" for name, why in given_up.items())][-1]
        return f"workers keep ending on {comma_separated(nodes)}: {error}"
    suspects = _suspects(job)
    news = _news(job, suspects)
    if not news:
        return None
    if len(news) <= len(_others(context, job, suspects)):
        return None
    return _most_common_error(news)


def _most_common_error(errors: dict[NodeName, str]) -> str:
    """Describe the error that most nodes report, and which nodes; on a tie, the first one."""
    error = Counter(errors.values()).most_common(1)[0][0]
    same = {name for name in errors if errors[name] == error}
    others = errors.keys() - same
    more = f"; something else on {comma_separated(others)}" if others else ""
    return f"{error} (on {comma_separated(same)}{more})"


def _lone_node(job: Job) -> NodeName | None:
    """Return the node at fault, if it is the job's only node; None: other nodes would fail as
    well."""
    if job.seen.faults.accused or job.left_out or len(job.seen.faults.ailing) != 1:
        return None
    return next(iter(job.seen.faults.ailing))


def leave_out(context: Context, job: Job) -> Decision | None:
    """Leave out nodes at fault, if the job can do without them."""
    suspects = _suspects(job)
    news = _news(job, suspects)
    if not news:
        return None
    if (due := _wait_until(context, job, suspects)) is not None:
        return Decision(wake_at=due, reason=f"{', '.join(news)}: {next(iter(news.values()))}")
    nodes = context.state.nodes
    return decide([left_out(job, nodes[name], why) for name, why in news.items()])


def _is_done_without(context: Context, job: Job, nodes: Collection[NodeName]) -> bool:
    """Return whether the job has other nodes and, after the first plan, can continue with them."""
    if job.current.made is None:
        return bool(_others(context, job, nodes))
    others = {*job.current.members} - {*nodes}
    return bool(others) and can_spare(context, job, {*nodes})


def _suspects(job: Job) -> dict[NodeName, str]:
    """Return the nodes that the job may do without, with the reasons."""
    return _ailing(job) | {worker.node: words for worker, words in _dying(job).items()}


def _ailing(job: Job) -> dict[NodeName, str]:
    """Return the errors that workers reported of their node or the job, oldest first."""
    reports = job.seen.faults.ailing | job.seen.faults.accused
    by_time = sorted((at, name, error) for name, (at, error) in reports.items())
    return {name: error for _, name, error in by_time}


def _accused(context: Context, job: Job) -> dict[NodeName, tuple[float, str]]:
    """Return the nodes that blamed the job recently enough to be the same fault as a new report."""
    accused = job.seen.faults.accused
    return {
        name: report for name, report in accused.items() if context.now < report[0] + _ONE_FAULT_S
    }


def _dying(job: Job) -> dict[WorkerId, str]:
    """Return the workers that keep ending without a committed step in between."""
    dying = {}
    for worker, deaths in sorted(job.seen.since_step.deaths.items()):
        if len(deaths) >= _MOST_ENDS:
            last = deaths[-1]
            words = job.seen.since_step.complaints.get(worker) or last_words(last)
            dying[worker] = (
                f"worker {worker} has ended {len(deaths)} times without a committed step between; "
                f"the last time {describe_exit(last)}: {words}"
            )
    return dying


def _given_up(job: Job) -> dict[NodeName, str]:
    """Return the nodes that have trained, and whose new processes end before they join a plan."""
    trained = job.current.trained.plan.nodes if job.current.trained is not None else ()
    now = {node: questions.ends_early(job, node) for node in trained}
    return job.seen.since_step.given_up | {node: why for node, why in now.items() if why}


def _news(job: Job, suspects: dict[NodeName, str]) -> dict[NodeName, str]:
    return {name: words for name, words in suspects.items() if name not in job.left_out}


def _others(context: Context, job: Job, suspects: Collection[NodeName]) -> list[Node]:
    """Return the candidates without a known fault. A node that is away counts until it is lost:
    after a restart of the master, the first node to return may be the faulty one."""
    return [node for node in context.state.candidates(job) if node.facts.node not in suspects]


def _wait_until(context: Context, job: Job, suspects: dict[NodeName, str]) -> float | None:
    """Return the time until which to wait for other nodes to report the same error; None: do not
    wait."""
    reports = job.seen.faults.ailing | job.seen.faults.accused
    since = [at for name, (at, _) in reports.items() if name not in job.left_out]
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

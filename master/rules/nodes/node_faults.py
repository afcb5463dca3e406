"""Rules about nodes that a job or the cluster does without.

A node that cannot take part is left out of the job until it registers anew: its processes have had
no part in a step while others have and say why or keep ending, or it reads other data than the
rest. A node that fails again and again is put in quarantine, a drain that ends by itself. That
follows so many losses of the node, or of workers on it, within ten minutes of each other, or an
agent that cannot start what workers are forked from. Each further one lasts twice as long. Nodes
that fail as most others do are not to blame. A job that waits for nodes gets one out of quarantine
rather than go on waiting.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from oobleck.core.ids import NodeName
from oobleck.core.units import count
from oobleck.master.events.nodes import NodeLeftOut, NodeQuarantined, NodeReleased
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import describe_exit, last_words
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

OTHER_DATA = "its data differ from those of the job's other nodes (same paths, other content)"
#: Failures within the window that a node is put aside for.
MOST_FAILURES = 5
#: Of the process that workers are forked from, in a row, before it was ready.
MOST_FAILED_STARTS = 3
#: No quarantine is longer, seconds.
LONGEST_S = 3600.0
#: Ends of a node's processes in plans, with no step that they had a part in.
_MOST_STILLBORN = 3


def left_out(job: Job, node: Node, reason: str) -> NodeLeftOut:
    return NodeLeftOut(job_id=job.id, node=node.facts.node, reason=reason)


def leave_out(context: Context, job: Job) -> Decision | None:
    state = context.state
    found = [(node, _reason(state, job, node)) for node in state.candidates(job)]
    return decide([left_out(job, node, reason) for node, reason in found if reason])


def _reason(state: ClusterState, job: Job, node: Node) -> str:
    """Why the node cannot take part; empty: nothing is known against it."""
    name = node.facts.node
    if name in job.seen.faults.unfit:
        return job.seen.faults.unfit[name]
    if why := ends_early(job, name):
        return why
    made = job.current.made
    if made is None or not made.data or not state.is_ready(node, job):
        return ""
    return "" if state.data_of(node) == made.data else OTHER_DATA


def ends_early(job: Job, node: NodeName) -> str:
    """Describe how the node's workers end before they take part in a step; empty: too few such
    ends."""
    ends = job.seen.faults.stillborn.get(node, [])
    if len(ends) < _MOST_STILLBORN:
        return ""
    return (
        f"its workers ended {len(ends)} times before they had a part in a step; the last "
        f"time {describe_exit(ends[-1])}: {last_words(ends[-1])}"
    )


def like_data(state: ClusterState, ready: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Split the `ready` nodes into those that read the most common data and the others. On a tie,
    the first node's data counts."""
    counts = Counter(state.data_of(node) for node in ready)
    most = counts.most_common(1)[0][0] if counts else ""
    like = [node for node in ready if state.data_of(node) == most]
    return like, [node for node in ready if state.data_of(node) != most]


def put_aside(context: Context) -> Decision | None:
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


def quarantine_s(node: Node, first_s: float) -> float:
    """Return the length of the node's next quarantine, seconds; the first one lasts `first_s`."""
    return min(LONGEST_S, first_s * 2.0**node.failures.quarantines)


def _all_flap(state: ClusterState, node: Node) -> bool:
    """Return whether at least half of the other nodes fail about as often: then the network or the
    job is at fault, not the node."""
    others = [other for other in state.nodes.values() if other is not node]
    bad = [other for other in others if len(other.failures.times) >= MOST_FAILURES - 1]
    return 2 * len(bad) >= len(others)


def release(context: Context) -> Decision | None:
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

"""Rules about nodes that cannot take part in the job, which the job must not suffer from.

What a process reports that has had no part in a step, while others have, counts against its node
alone. So does reading other data than the rest. Such a node is left out until it registers anew.
"""

from collections import Counter
from collections.abc import Sequence

from oobleck.master.events.nodes import NodeLeftOut
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import describe_exit
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.ids import NodeName

OTHER_DATA = "its data differ from those of the job's other nodes (same paths, other content)"
#: Ends of a node's processes in plans, with no step that they had a part in.
_MOST_STILLBORN = 3


def left_out(job: Job, node: Node, reason: str) -> NodeLeftOut:
    return NodeLeftOut(job_id=job.id, node=node.facts.node, reason=reason)


def leave_out(context: Context) -> Decision | None:
    state, job = context.state, context.state.job
    if job is None:
        return None
    found = [(node, _reason(state, job, node)) for node in state.candidates(job)]
    out = tuple(left_out(job, node, reason) for node, reason in found if reason)
    if not out:
        return None
    return Decision(actions=out, reason="; ".join(f"{o.node}: {o.reason}" for o in out))


def _reason(state: ClusterState, job: Job, node: Node) -> str:
    """Why the node cannot take part; empty: nothing is known against it."""
    name = node.facts.node
    if name in job.seen.faults.unfit:
        return job.seen.faults.unfit[name]
    if why := ends_early(job, name):
        return why
    made = job.made
    if made is None or not made.data or not state.is_ready(node, job):
        return ""
    return "" if state.data_of(node) == made.data else OTHER_DATA


def ends_early(job: Job, node: NodeName) -> str:
    """How the node's processes end that plans count on; empty: not often enough to say."""
    ends = job.seen.faults.stillborn.get(node, [])
    if len(ends) < _MOST_STILLBORN:
        return ""
    words = ends[-1].log_tail.strip() or "no output"
    return (
        f"its workers ended {len(ends)} times before they had a part in a step; the last "
        f"time {describe_exit(ends[-1])}: {words}"
    )


def like_data(state: ClusterState, ready: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Those that read what most of `ready` read (of equally many, what the first one reads), and
    the others."""
    counts = Counter(state.data_of(node) for node in ready)
    most = counts.most_common(1)[0][0] if counts else ""
    like = [node for node in ready if state.data_of(node) == most]
    return like, [node for node in ready if state.data_of(node) != most]

"""Rules about nodes whose agents say that a GPU is sick.

Such a node is drained before it dies, where that costs the job nothing that it was promised: one
node at a time, the sickest first, and only while the job without it can lose as many nodes as it
wants. What NVML says may be wrong. So nobody is drained where at least half of the nodes beside a
sick one are sick too, and a job that waits for nodes, or can lose fewer than it wants, gets the
sick ones back. They are drained again when it can do without them. What was wrong with a node when
an operator undrained it does not count, until its agent is started anew.
"""

from oobleck.master.events.nodes import NodeDrainRequested, NodeReleased
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.recovery.reconfigure import can_lose


def take_out(context: Context) -> Decision | None:
    """Have the sickest node drained, once it is known what becomes of the one before."""
    state, job = context.state, context.state.job
    if job is not None and (job.state != "running" or falls_short(job)):
        return None
    drains = [node.drain for node in state.nodes.values() if node.drain and node.is_out_as_sick]
    if any(not (drain.done or drain.kept) for drain in drains) or _most_are_sick(state):
        return None
    sick = [
        node for node in state.nodes.values() if node.drain is None and not node.seen.status.leaving
    ]
    troubles = {node.facts.node: node.troubles for node in sick if node.troubles}
    if not troubles:
        return None
    name = min(troubles, key=lambda name: (-len(troubles[name]), name))
    wish = NodeDrainRequested(
        node=name, request_id="", reason="; ".join(troubles[name]), force=False
    )
    return Decision(actions=(wish,), reason=f"{name}: a GPU is sick")


def take_back(context: Context) -> Decision | None:
    """Have sick nodes train again where they are needed, or where it is no word about a node."""
    state, job = context.state, context.state.job
    if _most_are_sick(state):
        why = "most nodes are sick, so it may be a false alarm"
    elif job is not None and job.state == "waiting for nodes":
        why = f"job {job.id} waits for nodes"
    elif job is not None and job.state == "running" and falls_short(job):
        why = f"job {job.id} can lose fewer nodes than it wants"
    else:
        return None
    return decide(
        [
            NodeReleased(node=name, reason=why)
            for name, node in sorted(state.nodes.items())
            if node.connected and node.is_out_as_sick and not node.seen.status.leaving
        ]
    )


def falls_short(job: Job) -> bool:
    """Return whether the job's newest plan tolerates fewer lost nodes than the job asks for, with
    no follow-up plan due that could mend it."""
    made = job.current.made
    if made is None or made.then:
        return False
    return can_lose(made.plan) < job.spec.fault_tolerance


def _most_are_sick(state: ClusterState) -> bool:
    """Return whether at least half of the other nodes are sick, for each sick node. Registered
    nodes that are not connected count as well."""
    registered = [node for node in state.nodes.values() if node.registered]
    sick = [node for node in registered if node.troubles]
    return bool(sick) and 2 * (len(sick) - 1) >= len(registered) - 1


def is_too_much(job: Job, node: Node, left: int) -> bool:
    """Return whether the job needs this node, which is out only as sick: without it the job could
    lose `left` nodes, fewer than it asks for."""
    return node.is_out_as_sick and left < job.spec.fault_tolerance

"""Rules about nodes that fail again and again: they are put aside, and come back by themselves.

A quarantine is a drain that ends. It comes after so many losses of the node, or of workers on it,
within ten minutes of each other, or where the node's agent cannot start what workers are forked
from; each further one lasts twice as long. Nodes that fail as most others do are not to blame, and
a job that waits for nodes gets one out of quarantine rather than go on waiting.
"""

from collections.abc import Iterator

from oobleck.master.events.nodes import NodeQuarantined, NodeReleased
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.drains import is_quarantined
from oobleck.master.state.node import Node
from oobleck.planner.units import count

#: Failures within the window that a node is put aside for.
MOST_FAILURES = 5
#: Of the process that workers are forked from, in a row, before it was ready.
MOST_FAILED_STARTS = 3
#: No quarantine is longer, seconds.
LONGEST_S = 3600.0


def put_aside(context: Context) -> Decision | None:
    first_s = context.timing.quarantine_s
    if not first_s:
        return None
    events = tuple(_quarantines(context.state, first_s))
    if not events:
        return None
    return Decision(actions=events, reason="; ".join(f"{e.node}: {e.reason}" for e in events))


def _quarantines(state: ClusterState, first_s: float) -> Iterator[NodeQuarantined]:
    for name, node in sorted(state.nodes.items()):
        if node.drain is not None:
            continue
        seconds = next_s(node, first_s)
        status = node.seen.status
        if node.connected and status.failed_starts >= MOST_FAILED_STARTS:
            yield NodeQuarantined(
                node=name, reason=status.trouble, seconds=seconds, until_ready=True
            )
        elif _flaps(node) and not _all_flap(state, node):
            failures = node.failures
            span_s = failures.times[-1] - failures.times[0]
            reason = (
                f"failed {count(len(failures.times), 'time')} in {span_s:.0f} s, the last time: "
                f"{failures.last}"
            )
            yield NodeQuarantined(node=name, reason=reason, seconds=seconds)


def next_s(node: Node, first_s: float) -> float:
    """How long the node's next quarantine lasts, where a first one lasts `first_s`."""
    return min(LONGEST_S, first_s * 2.0**node.failures.quarantines)


def _flaps(node: Node) -> bool:
    return len(node.failures.times) >= MOST_FAILURES


def _all_flap(state: ClusterState, node: Node) -> bool:
    """Whether it is no worse than others: the network or the job is at fault then."""
    others = [other for other in state.nodes.values() if other is not node]
    bad = [other for other in others if len(other.failures.times) >= MOST_FAILURES - 1]
    return 2 * len(bad) >= len(others)


def release(context: Context) -> Decision | None:
    state, job = context.state, context.state.job
    released: list[NodeReleased] = []
    wake_at: float | None = None
    for name, node in sorted(state.nodes.items()):
        due = node.seen.release_at
        if not is_quarantined(node) or due is None or node.drain is None:
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
    if released:
        why = "; ".join(f"{event.node}: {event.reason}" for event in released)
        return Decision(actions=tuple(released), reason=why)
    return Decision(wake_at=wake_at) if wake_at is not None else None

"""Which pairs of nodes the data network does not join, as workers tell.

Owns how their reports are kept (`JobSeen.no_way`). Must not know what follows from them.
"""

from oobleck.host.ipc.messages import PeerLost
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.planner.ids import NodeName, WorkerId

#: Two nodes, in the order of their names, one of which reported that it does not reach the other.
Pair = tuple[NodeName, NodeName]


def note(state: ClusterState, job: Job, worker: WorkerId, lost: PeerLost) -> None:
    """Keep to whom `worker` says that there is no way, if it does."""
    if lost.generation != job.generation or not (lost.store_unreached or lost.unreached):
        return
    if (host := meeting_host(state, job)) is None:
        return
    others = {peer.node for peer in lost.unreached} | ({host} if lost.store_unreached else set())
    pairs = {ordered(worker.node, other) for other in others - {worker.node}}
    if pairs:
        job.seen.since_step.no_way.setdefault(host, set()).update(pairs)


def ordered(a: NodeName, b: NodeName) -> Pair:
    return (min(a, b), max(a, b))


def meeting_host(state: ClusterState, job: Job) -> NodeName | None:
    """The node at whose store the newest generation meets."""
    if job.made is None:
        return None
    store = job.made.rendezvous.store
    for name in job.members:
        node = state.nodes.get(name)  # one of a job that has ended may be forgotten
        if node and any(worker.store == store for worker in node.seen.status.workers):
            return name
    return None

"""Which nodes the data network has cut off from the others, though all agents are heard.

Workers meet anew where they lost each other, and say to whom there is no way: to the store of the
meeting, or to a member of it. Each such pair of nodes cannot both take part. The nodes to go on
without are the fewest that leave no such pair, and they are told only when two meetings at
different nodes' stores say the same: with one meeting alone, whoever hosts it looks cut off in any
partition. Workers that are cut off in the middle of training say so of their neighbours in the ring
of lifelines: where all others have told, and each pair has the same one node in it, that is proof
enough. A node that is given up is put aside as any that fails again and again, each time for
longer, and joins again when its time is over. Where the others cannot go on without, all meet
again, as they do where nobody knows who is to blame. Owns what is known of such pairs and what
follows; `note` keeps, all else is pure.
"""

from collections import Counter
from collections.abc import Iterable

from oobleck.host.messages import PeerLost
from oobleck.master import quarantine
from oobleck.master.decision import Decision, Look
from oobleck.master.job import Job
from oobleck.master.nodeevents import NodeQuarantined, NodeReset
from oobleck.master.stalls import can_spare
from oobleck.master.state import ClusterState
from oobleck.planner.ids import NodeName, WorkerId

#: Two nodes, in the order of their names, one of which reported that it does not reach the other.
Pair = tuple[NodeName, NodeName]


def note(state: ClusterState, job: Job, worker: WorkerId, lost: PeerLost) -> None:
    """Keep to whom `worker` says that there is no way, if it does."""
    if lost.generation != job.generation or not (lost.store_unreached or lost.unreached):
        return
    if (host := _host(state, job)) is None:
        return
    others = {peer.node for peer in lost.unreached} | ({host} if lost.store_unreached else set())
    pairs = {_pair(worker.node, other) for other in others - {worker.node}}
    if pairs:
        job.seen.no_way.setdefault(host, set()).update(pairs)


def _pair(a: NodeName, b: NodeName) -> Pair:
    return (min(a, b), max(a, b))


def give_up_at_once(look: Look, job: Job) -> Decision | None:
    """Have the others go on without the one node that, as all others have told, its neighbours do
    not reach any more; None: who is cut off is not that clear, or the node is needed."""
    told = {w: {p.node for p in lost.unreached} for w, (_, lost) in job.seen.peers_lost.items()}
    blamed = {(other, w.node) for w, others in told.items() for other in others - {w.node}}
    for node in sorted({other for other, _ in blamed}):
        witnesses = [by for other, by in blamed if other == node]
        rest = {worker for worker in job.processes() if worker.node != node}
        clear = len(witnesses) > 1 and all(node in pair for pair in blamed) and rest <= told.keys()
        if clear and can_spare(look, job, {node}):
            pairs = {_pair(other, by) for other, by in blamed}
            return _go_on_without(look, job, {node}, pairs)
    return None


def give_up(look: Look, job: Job) -> Decision | None:
    """Have the others go on without nodes that are cut off; None: it is not known, or they are
    needed."""
    host = _host(look.state, job)
    no_way = job.seen.no_way
    if host is None or host not in no_way:
        return None
    known = {pair for pairs in no_way.values() for pair in pairs}
    nodes = _fewest(job, known)
    if not nodes:
        return None
    if nodes <= set(job.newcomers):
        # They have trained nothing, and cost the others every meeting.
        if not job.seen.regroups or not look.timing.quarantine_s:
            return None
    elif nodes != _fewest(job, (p for at, pairs in no_way.items() if at != host for p in pairs)):
        return None
    return _go_on_without(look, job, nodes, known) if can_spare(look, job, nodes) else None


def _go_on_without(look: Look, job: Job, nodes: set[NodeName], pairs: set[Pair]) -> Decision:
    actions = [event for node in sorted(nodes) for event in _events(look, job, node, pairs)]
    reason = "; ".join(event.reason for event in actions if isinstance(event, NodeReset))
    return Decision(actions=tuple(actions), reason=reason)


def _events(
    look: Look, job: Job, name: NodeName, pairs: set[Pair]
) -> Iterable[NodeReset | NodeQuarantined]:
    told = {node for pair in pairs if name in pair for node in pair}
    others = sorted(told & set(job.members) - {name})
    do = "does" if len(others) == 1 else "do"
    reason = f"data network of {name} is cut: {', '.join(others)} {do} not reach it"
    yield NodeReset(job_id=job.id, node=name, reason=reason, cut_off=True)
    node = look.state.nodes[name]
    if look.timing.quarantine_s and node.drain is None:
        seconds = quarantine.next_s(node, look.timing.quarantine_s)
        yield NodeQuarantined(node=name, reason=reason, seconds=seconds)


def _fewest(job: Job, pairs: Iterable[Pair]) -> set[NodeName]:
    """Nodes without which all others reach each other, as far as is known: again and again the one
    that is in most pairs; of equals a newcomer, then the last by name, so that it stays the same.
    """
    members = set(job.members)
    left = {pair for pair in pairs if members.issuperset(pair)}
    out: set[NodeName] = set()
    while left:
        degrees = Counter(node for pair in left for node in pair)
        worst = max(degrees, key=lambda node: (degrees[node], node in job.newcomers, node))
        out.add(worst)
        left = {pair for pair in left if worst not in pair}
    return out


def _host(state: ClusterState, job: Job) -> NodeName | None:
    """The node at whose store the newest generation meets."""
    if job.made is None:
        return None
    store = job.made.rendezvous.store
    for name in job.members:
        node = state.nodes.get(name)  # one of a job that has ended may be forgotten
        if node and any(worker.store == store for worker in node.seen.status.workers):
            return name
    return None

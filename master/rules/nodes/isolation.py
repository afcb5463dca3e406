"""Detection of nodes that the data network has cut off, though all agents are heard.

Workers that lose each other report which peers they cannot reach: peers whose hosts are silent in
the middle of training, and in a rendezvous its host or a member. Two such nodes cannot both take
part. The nodes to go on without are the fewest that leave no such pair. On a tie, as between two
nodes that do not reach each other, those whose loss costs less are chosen.

Reports of all others, about peers rather than the host of a rendezvous, are proof enough: the
others go on at once. One node's report against another's proves nothing. Several nodes are given up
only if they are fewer than half, since a network that is gone as a whole often comes back. Without
reports of all others, two rendezvous at different nodes must agree: with one alone, its host looks
cut off in any partition. A node that is given up is put aside like any that fails repeatedly, each
time for longer. It joins again when its time is over. Where the others cannot go on without it, all
meet again, as they do where the fault cannot be attributed. Pure; the workers' reports are in
`oobleck.master.state.reducer.worker_reports`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from oobleck.core.ids import NodeName
from oobleck.master.events.nodes import NodeQuarantined, NodeReset
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.jobs.stalls import plan_without
from oobleck.master.rules.nodes import node_faults
from oobleck.master.rules.plans import holders
from oobleck.master.state.job import Job
from oobleck.master.state.reducer.worker_reports import Pair, ordered, rendezvous_host
from oobleck.planner.recovery.reconfigure import can_lose

Nodes = frozenset[NodeName]


def give_up_at_once(context: Context, job: Job) -> Decision | None:
    """Have the others go on without the fewest nodes that leave no two that do not reach each
    other, where all others have told; None: that is not so, or they are needed."""
    told = {worker: lost.unreached for worker, (_, lost) in job.seen.peers_lost.items()}
    pairs = _proven(
        {(by.node, peer.node) for by, peers in told.items() for peer in peers},
        {worker.node for worker in told},
    )

    def clear(nodes: Nodes) -> bool:
        few = len(nodes) == 1 or 2 * len(nodes) < len(job.current.members)
        return few and {w for w in job.current.processes() if w.node not in nodes} <= told.keys()

    ways = sorted(_ways(job, pairs), key=clear, reverse=True)
    if not any(map(clear, ways)):
        return None
    nodes = _cheapest(context, job, ways, with_state=False)
    if nodes is None or not clear(nodes):
        return None
    silent_at = min(at for at, _ in job.seen.peers_lost.values()) - context.timing.silence_s
    detect_s = context.now - max(silent_at, job.seen.steps.recorded_at or 0.0)
    return _go_on_without(context, job, nodes, pairs, detect_s=detect_s)


def _proven(accusations: Set[tuple[NodeName, NodeName]], told: Set[NodeName]) -> set[Pair]:
    """The pairs but those where one node's word stands alone against another's: both have told,
    only one does not reach the other, and nobody else complains of either."""
    pairs = {ordered(by, of) for by, of in accusations if by != of}
    degrees = Counter(node for pair in pairs for node in pair)

    def contested(pair: Pair) -> bool:
        alone = all(degrees[node] == 1 for node in pair)
        return alone and set(pair) <= told and not {pair, pair[::-1]} <= accusations

    return {pair for pair in pairs if not contested(pair)}


def give_up(context: Context, job: Job) -> Decision | None:
    """Have the others go on without nodes that are cut off; None: it is not known, or they are
    needed."""
    host = rendezvous_host(context.state, job)
    no_way = job.seen.since_step.no_way
    if host is None or host not in no_way:
        return None
    known = {pair for pairs in no_way.values() for pair in pairs}
    before = {pair for at, pairs in no_way.items() if at != host for pair in pairs}

    def agreed(nodes: Nodes) -> bool:
        if nodes <= set(job.current.newcomers):
            # They have trained nothing, and cost the others every rendezvous.
            return bool(job.seen.since_step.regroups and context.timing.quarantine_s)
        return nodes in _ways(job, before)

    nodes = _cheapest(context, job, filter(agreed, _ways(job, known)), with_state=True)
    return _go_on_without(context, job, nodes, known) if nodes else None


class _Cost(NamedTuple):
    """Cost of going on without some nodes, compared field by field in this order."""

    state_lost: bool
    guarantees_lost: int
    layers_moved: int


def _cheapest(
    context: Context, job: Job, ways: Iterable[Nodes], *, with_state: bool
) -> Nodes | None:
    """The nodes whose loss costs the job least, of equals the first; None: it cannot go on without
    any. `with_state`: state that they alone hold may go with them, where there is a checkpoint."""
    costs = {nodes: cost for nodes in ways if (cost := _cost(context, job, nodes)) is not None}
    best = min(costs, key=costs.__getitem__, default=None)
    return None if best is None or (costs[best].state_lost and not with_state) else best


def _cost(context: Context, job: Job, nodes: Nodes) -> _Cost | None:
    """Return the cost of going on without `nodes`; None: the others cannot."""
    assert job.current.made is not None, "only asked of a job with a plan"
    if nodes <= set(job.current.newcomers):
        return _Cost(state_lost=False, guarantees_lost=0, layers_moved=0)
    if (plan := plan_without(context, job, nodes)) is None:
        return None
    held = job.current.made.plan.held
    moved = (set(layers) - set(held.get(w, ())) for w, layers in plan.held.items())
    return _Cost(
        state_lost=holders.lost_layers(context.state, job, plan) is not None,
        guarantees_lost=job.current.made.can_lose - can_lose(plan),
        layers_moved=sum(map(len, moved)),
    )


def _go_on_without(
    context: Context, job: Job, nodes: Nodes, pairs: Set[Pair], *, detect_s: float = 0.0
) -> Decision:
    actions = [
        event for node in sorted(nodes) for event in _events(context, job, node, pairs, detect_s)
    ]
    reason = "; ".join(event.reason for event in actions if isinstance(event, NodeReset))
    return Decision(actions=tuple(actions), reason=reason)


def _events(
    context: Context, job: Job, name: NodeName, pairs: Set[Pair], detect_s: float
) -> Iterable[NodeReset | NodeQuarantined]:
    reason, node = _reason(job, name, pairs), context.state.nodes[name]
    aside = bool(context.timing.quarantine_s) and node.drain is None
    yield NodeReset(
        job_id=job.id,
        node=name,
        reason=reason,
        cut_off=True,
        keeps_workers=aside,  # else it would be in the next plan with them
        detect_s=detect_s,
    )
    if aside:
        seconds = node_faults.quarantine_s(node, context.timing.quarantine_s)
        yield NodeQuarantined(node=name, reason=reason, seconds=seconds)


def _reason(job: Job, name: NodeName, pairs: Set[Pair]) -> str:
    told = {node for pair in pairs if name in pair for node in pair}
    others = sorted(told & set(job.current.members) - {name})
    if len(others) == 1:
        return f"data network between {name} and {others[0]} is cut"
    return f"data network of {name} is cut: {', '.join(others)} do not reach it"


def _ways(job: Job, pairs: Iterable[Pair]) -> tuple[Nodes, ...]:
    """The fewest nodes without which all others reach each other, as far as is known: two ways
    where they can be chosen."""
    members = sorted(job.current.members)
    between = {pair for pair in pairs if set(pair) <= set(members)}
    ways = dict.fromkeys(_fewest(job, between, order) for order in (members, members[::-1]))
    least = min(map(len, ways))
    return tuple(nodes for nodes in ways if nodes and len(nodes) == least)


def _fewest(job: Job, pairs: Set[Pair], order: Sequence[NodeName]) -> Nodes:
    """Take out the node that is in most pairs until no pair is left. Where several are in as many,
    a newcomer goes first, then the one that comes last in `order`: whoever tells first, the answer
    is the same."""
    left, out = set(pairs), set[NodeName]()
    while left:
        degrees = Counter(node for pair in left for node in pair)
        worst = max(degrees, key=lambda n: (degrees[n], n in job.current.newcomers, order.index(n)))
        out.add(worst)
        left = {pair for pair in left if worst not in pair}
    return frozenset(out)

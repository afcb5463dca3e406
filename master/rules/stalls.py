"""Rules about lack of progress though no worker is missing: the safety net of all other rules.

1. Workers that lost a peer meet anew, at growing intervals. The job fails only after many
   rendezvous and a long time without a step.
2. If the data network has cut nodes off, the others continue without them. Workers report which
   peers they cannot reach; two such nodes cannot both take part. The nodes left out are the fewest
   that leave no such pair, and on a tie those whose loss costs less.
3. If there is no progress at all (a message never arrives, a bug), the workers meet anew. They do
   so in a new generation of the same plan, at another worker. If some do not join that rendezvous,
   their nodes begin anew and the others continue. If they cannot, all meet again, each time after
   twice as long.

For cut nodes, reports of all other workers about peers are proof enough, and the others continue at
once. One node's report against another's proves nothing. Several nodes are given up only if they
are fewer than half, since a network that is gone as a whole often returns. Without reports of all
others, two rendezvous at different nodes must agree. With one alone, its host looks cut off in any
partition. A node that is given up is put in quarantine, and joins again afterwards. Pure; the
workers' reports are in `oobleck.master.state.reducer.worker_reports`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan
from oobleck.host.detection import Detection, patience_s
from oobleck.master.events.nodes import (
    NodeLeftOut,
    NodeQuarantined,
    NodeReset,
)
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, left_out
from oobleck.master.rules.next_plan import can_spare, plan_without
from oobleck.master.rules.plan_made import meet_again
from oobleck.master.rules.questions import first_peer_lost, interval_s
from oobleck.master.state.job import Job
from oobleck.master.state.reducer.worker_reports import Pair, ordered, rendezvous_host
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.recovery.reconfigure import can_lose

#: Steps after which their duration is known; the first one often takes longer.
_KNOWN_STEPS = 2
#: Lowest speed at which a network or a disk moves layers.
_SLOWEST_BYTES_PER_S = 25e6


def next_rendezvous(job: Job, timing: Detection, now: float) -> str:
    """Describe for operators why and when the workers meet again; empty: no rendezvous is due."""
    if job.current.made is None or job.current.losses or (first := first_peer_lost(job)) is None:
        return ""
    at, worker, lost = first
    left_s = max(0.0, at + interval_s(job, timing) - now)
    before = (
        f", meeting {job.seen.since_step.regroups + 1} since the last step"
        if job.seen.since_step.regroups
        else ""
    )
    cause = lost.detail if lost.left else f"{worker} lost a peer: {lost.detail}"
    return f"{cause}; the workers meet again in {left_s:.0f} s{before}"


def rouse(context: Context, job: Job) -> Decision | None:
    """Have the workers meet again, or leave out nodes, after too long without progress."""
    if job.current.losses or job.state == "waiting for nodes":
        return None
    since = job.seen.progressed_at
    if since is None or job.all_finished():
        return None
    if not all(context.state.nodes[name].connected for name in job.current.members):
        return None  # wait until they return or their leases end
    if first_peer_lost(job) is not None:
        return None  # a rendezvous is due already
    due = since + _patience_s(context, job)
    if context.now < due:
        return Decision(wake_at=due)
    idle_s = context.now - since
    absent = _absent(job) if job.seen.since_step.stalls else ()
    if (out := _give_up(context, job, absent, idle_s)) is not None:
        return out
    names = ", ".join(map(str, absent))
    reason = f"no progress for {idle_s:.0f} s though nobody is missing"
    if absent:
        reason += f"; {names} did not join the others, which cannot go on without"
    return meet_again(context, job, cause="no progress", reason=reason, detect_s=idle_s)


def _patience_s(context: Context, job: Job) -> float:
    """Return how long the newest generation may go without progress, seconds."""
    timing, seen = context.timing, job.seen
    known = len(seen.steps.recent) >= _KNOWN_STEPS
    usual_s = max(record.step_seconds for record in seen.steps.recent) if known else 0.0
    usual_s *= 1 + _evaluation_steps(job)
    made, timeline = job.current.made, seen.timeline
    assert made is not None, "only asked of a job with a plan"
    met = timeline is None or len(timeline.entered) == len(made.plan.workers)
    if not met or seen.steps.furthest_step >= job.spec.training.steps:
        moving_s = _moving_s(job.spec, made.plan, made.worker_slots)
        limit_s = patience_s(timing.meeting_s, usual_s) + moving_s
    elif not known:
        limit_s = timing.first_step_s
    else:
        limit_s = patience_s(timing.stall_s, usual_s)
    if _busy(context, job):
        # The others wait for a busy worker; if it hangs, its agent notices before this limit.
        limit_s = max(limit_s, timing.storage_s + timing.stall_s)
    return limit_s * float(2 ** max(0, seen.since_step.stalls - 1))


def _busy(context: Context, job: Job) -> bool:
    """Return whether a worker of the plan is busy with work of its own, and waits for no other."""
    for worker in job.current.processes():
        status = context.state.nodes[worker.node].seen.status.worker(worker.slot)
        if status is not None and status.doing and not status.waiting:
            return True
    return False


def _evaluation_steps(job: Job) -> float:
    """Return an upper bound on the time of an evaluation that may be under way, in steps."""
    evaluation, training = job.spec.evaluation, job.spec.training
    if evaluation is None or not evaluation.due(job.seen.steps.furthest_step, training.steps):
        return 0.0
    done = job.seen.steps.evaluation
    if done is not None and done.step >= job.seen.steps.furthest_step:
        return 0.0
    return evaluation.samples / training.global_batch


@lru_cache(maxsize=32)
def _moving_s(spec: JobSpec, plan: Plan, worker_slots: int) -> float:
    """Return how long the layers of any one worker may take to reach it, or a disk, seconds."""
    profile = estimate_profile(spec, gpus_per_node=worker_slots, memory_per_worker_bytes=1)
    sizes = [layer.travelling_bytes for layer in profile.layers]
    most = max(sum(sizes[layer] for layer in layers) for layers in plan.held.values())
    return most / _SLOWEST_BYTES_PER_S


def _absent(job: Job) -> tuple[WorkerId, ...]:
    """Return the workers missing at the newest generation's rendezvous where others have arrived;
    empty if none or all are missing."""
    made, timeline = job.current.made, job.seen.timeline
    if made is None or made.boundary or timeline is None:
        return ()
    finished = {w for w, process in job.current.processes().items() if job.has_finished(process)}
    for here in (timeline.answered, timeline.joined, timeline.entered, finished):
        absent = tuple(worker for worker in made.plan.workers if worker not in here)
        if absent:
            return absent if len(absent) < len(made.plan.workers) else ()
    return ()


def _give_up(
    context: Context, job: Job, absent: Sequence[WorkerId], idle_s: float
) -> Decision | None:
    """Reset the nodes of the absent workers; None: the others need their state."""
    if not absent or not can_spare(context, job, {worker.node for worker in absent}):
        return None
    out: list[NodeLeftOut | NodeReset] = []
    for name in sorted({worker.node for worker in absent}):
        names = ", ".join(str(worker) for worker in absent if worker.node == name)
        generation = job.current.generation
        why = f"{names} did not come to the others of generation {generation} for {idle_s:.0f} s"
        if name in job.current.newcomers:
            out.append(left_out(job, context.state.nodes[name], why))
        else:
            out.append(NodeReset(job_id=job.id, node=name, reason=why))
    return Decision(actions=tuple(out), reason="; ".join(event.reason for event in out))


Nodes = frozenset[NodeName]


def give_up_at_once(context: Context, job: Job) -> Decision | None:
    """Leave out the fewest nodes without which all others reach each other, if all others have
    reported. None: they have not, or the nodes are needed."""
    unreached = {worker: lost.unreached for worker, (_, lost) in job.seen.peers_lost.items()}
    pairs = _proven(
        {(by.node, peer.node) for by, peers in unreached.items() for peer in peers},
        {worker.node for worker in unreached},
    )

    def clear(nodes: Nodes) -> bool:
        few = len(nodes) == 1 or 2 * len(nodes) < len(job.current.members)
        return (
            few and {w for w in job.current.processes() if w.node not in nodes} <= unreached.keys()
        )

    ways = sorted(_ways(job, pairs), key=clear, reverse=True)
    if not any(map(clear, ways)):
        return None
    nodes = _cheapest(context, job, ways, with_state=False)
    if nodes is None or not clear(nodes):
        return None
    silent_at = min(at for at, _ in job.seen.peers_lost.values()) - context.timing.silence_s
    detect_s = context.now - max(silent_at, job.seen.steps.recorded_at or 0.0)
    return _go_on_without(context, job, nodes, pairs, detect_s=detect_s)


def _proven(accusations: Set[tuple[NodeName, NodeName]], reporters: Set[NodeName]) -> set[Pair]:
    """Return the pairs of nodes that do not reach each other. A pair is contested, and left out, if
    one node's report is the only complaint about either, and both have reported."""
    pairs = {ordered(by, of) for by, of in accusations if by != of}
    degrees = Counter(node for pair in pairs for node in pair)

    def contested(pair: Pair) -> bool:
        alone = all(degrees[node] == 1 for node in pair)
        return alone and set(pair) <= reporters and not {pair, pair[::-1]} <= accusations

    return {pair for pair in pairs if not contested(pair)}


def give_up(context: Context, job: Job) -> Decision | None:
    """Leave out nodes that are cut off; None: that is not known, or they are needed."""
    host = rendezvous_host(context.state, job)
    no_way = job.seen.since_step.no_way
    if host is None or host not in no_way:
        return None
    known = {pair for pairs in no_way.values() for pair in pairs}
    before = {pair for at, pairs in no_way.items() if at != host for pair in pairs}

    def agreed(nodes: Nodes) -> bool:
        if nodes <= set(job.current.newcomers):
            # Newcomers have no state, and every rendezvous with them fails.
            return bool(job.seen.since_step.regroups and context.timing.quarantine_s)
        return nodes in _ways(job, before)

    nodes = _cheapest(context, job, filter(agreed, _ways(job, known)), with_state=True)
    return _go_on_without(context, job, nodes, known) if nodes else None


class _Cost(NamedTuple):
    """Cost of continuing without some nodes, compared field by field in this order."""

    state_lost: bool
    guarantees_lost: int
    layers_moved: int


def _cheapest(
    context: Context, job: Job, ways: Iterable[Nodes], *, with_state: bool
) -> Nodes | None:
    """Return the nodes whose loss costs the job least; the first on a tie. None: it cannot continue
    without any. `with_state`: state that only they hold may be lost, where there is a
    checkpoint."""
    costs = {nodes: cost for nodes in ways if (cost := _cost(context, job, nodes)) is not None}
    best = min(costs, key=costs.__getitem__, default=None)
    return None if best is None or (costs[best].state_lost and not with_state) else best


def _cost(context: Context, job: Job, nodes: Nodes) -> _Cost | None:
    """Return the cost of continuing without `nodes`; None: the others cannot."""
    assert job.current.made is not None, "only asked of a job with a plan"
    if nodes <= set(job.current.newcomers):
        return _Cost(state_lost=False, guarantees_lost=0, layers_moved=0)
    if (plan := plan_without(context, job, nodes)) is None:
        return None
    held = job.current.made.plan.held
    moved = (set(layers) - set(held.get(w, ())) for w, layers in plan.held.items())
    return _Cost(
        state_lost=questions.lost_layers(context.state, job, plan) is not None,
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
        keeps_workers=aside,  # without quarantine it would be in the next plan again
        detect_s=detect_s,
    )
    if aside:
        seconds = questions.quarantine_s(node, context.timing.quarantine_s)
        yield NodeQuarantined(node=name, reason=reason, seconds=seconds)


def _reason(job: Job, name: NodeName, pairs: Set[Pair]) -> str:
    peers = {node for pair in pairs if name in pair for node in pair}
    others = sorted(peers & set(job.current.members) - {name})
    if len(others) == 1:
        return f"data network between {name} and {others[0]} is cut"
    return f"data network of {name} is cut: {', '.join(others)} do not reach it"


def _ways(job: Job, pairs: Iterable[Pair]) -> tuple[Nodes, ...]:
    """Return the fewest nodes without which all others reach each other, as far as is known; two
    such sets if there is a choice."""
    members = sorted(job.current.members)
    between = {pair for pair in pairs if set(pair) <= set(members)}
    ways = dict.fromkeys(_fewest(job, between, order) for order in (members, members[::-1]))
    least = min(map(len, ways))
    return tuple(nodes for nodes in ways if nodes and len(nodes) == least)


def _fewest(job: Job, pairs: Set[Pair], order: Sequence[NodeName]) -> Nodes:
    """Take out the node that is in most pairs until no pair is left. On a tie a newcomer goes
    first, then the last one in `order`. So the answer does not depend on the order of reports."""
    left, out = set(pairs), set[NodeName]()
    while left:
        degrees = Counter(node for pair in left for node in pair)
        worst = max(degrees, key=lambda n: (degrees[n], n in job.current.newcomers, order.index(n)))
        out.add(worst)
        left = {pair for pair in left if worst not in pair}
    return frozenset(out)


def meet_after_peer_loss(context: Context, job: Job) -> Decision | None:
    """Have workers that lost a peer meet again, if no worker is missing."""
    state = context.state
    if job.current.losses or job.state == "waiting for nodes":
        return None
    if (report := questions.first_peer_lost(job)) is None:
        return None
    if not all(state.nodes[name].connected for name in job.current.members):
        return None
    if (without := give_up_at_once(context, job)) is not None:
        return without
    first, worker, lost = report
    due = first + questions.interval_s(job, context.timing)
    if context.now < due:
        return Decision(wake_at=due, reason=f"{worker} lost a peer and nobody is missing so far")
    if (without := give_up(context, job)) is not None:
        return without
    if job.current.newcomers and job.seen.since_step.regroups:
        why = f"the workers cannot meet with it: {worker} lost a peer: {lost.detail}"
        out = tuple(left_out(job, state.nodes[node], why) for node in job.current.newcomers)
        return Decision(actions=out, reason=why)
    reason = f"{worker} lost a peer though nobody is missing: {lost.detail}"
    if lost.left:
        reason = lost.detail
    return meet_again(context, job, cause="peers lost", reason=reason, detect_s=context.now - first)

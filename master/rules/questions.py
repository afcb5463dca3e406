"""Questions that several rules ask of the state: holders of layers, nodes that are away or ready.

Holders of state are derived from the plans that live workers have entered (`Lineage.plans`) and
from their agents' reports. Pure. Must not know the decisions based on an answer.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from oobleck.core.ids import Generation, Incarnation, NodeName, WorkerId
from oobleck.core.messages import PeerLost
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost, Shard, ShardTable, require_holders
from oobleck.core.units import comma_separated
from oobleck.host.detection import Detection
from oobleck.master.events.jobs import (
    ProfileChosen,
)
from oobleck.master.events.nodes import (
    WorkerLost,
)
from oobleck.master.rules.decision import Context
from oobleck.master.state.cluster import GENERATIONS_PER_TERM, ClusterState
from oobleck.master.state.incident import describe_exit, last_words
from oobleck.master.state.job import NO_GENERATION, Job
from oobleck.master.state.node import Node
from oobleck.planner.profile.measurement import check_measured, profile_key
from oobleck.planner.recovery.answer import Answer, Exposure
from oobleck.planner.recovery.course import adds_holders
from oobleck.planner.recovery.outlook import Outlook, best_interval_s
from oobleck.planner.recovery.reconfigure import can_lose

OTHER_DATA = "its data differ from those of the job's other nodes (same paths, other content)"
#: Longest quarantine, seconds.
LONGEST_QUARANTINE_S = 3600.0
#: Ends of a node's processes that took part in no step, before the node is left out.
_MOST_STILLBORN = 3
#: Most doublings of the interval between two rendezvous.
_MOST_DOUBLINGS = 20


# ---- Expectations


#: Least share of losses that are assumed to need a checkpoint: workers survive most, never all.
_LEAST_SHARE = 0.01
#: Seconds of a save where none is known, and limits of the time between two.
_UNKNOWN_SAVE_S = 5.0
_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 60.0, 2 * 3600.0
#: Least time between two saves, in saves.
_LEAST_SAVES = 4
#: Steps between two checkpoints where there are none.
_NEVER = 1e15


def outlook(state: ClusterState, job: Job, now: float) -> Outlook:
    """Return the outlook for a plan of the job that is made now."""
    steps, saved, unix = job.seen.steps, job.saves.checkpoint, job.seen.unix(now)
    losses = state.losses_until(unix)
    restored = job.rollback.restored
    done = job.committed_step
    if job.rollback.redo_until:  # the newest record is of a step that was undone
        done = steps.furthest_step
    saved_step = restored.step if restored is not None else 0
    if saved is not None:
        saved_step = saved.step
    step_s = _usual_step_s(job)
    left = max(1.0, job.spec.training.steps - done)
    every, next_s = _saves(state, job, now)
    return Outlook(
        per_node_s=losses.per_node_s(job.spec.recovery.mtbf_s),
        seen_per_node_s=losses.seen_per_node_s,
        joins_per_s=losses.joins_per_s(step_s),
        whole_rack=losses.rack_share(racks_of_live(state)),
        sizes=losses.sizes,
        left_steps=left,
        left_s=left * step_s if steps.recent else None,
        behind_steps=max(0, done - saved_step),
        every_steps=every,
        next_s=next_s,
        back_s=job.lineage.back_s,
        rejoin_s=job.lineage.rejoin_s,
        switch_s=job.lineage.switch_s,
        kept=job.lineage.salvage * _progress(job, now),
        transfers=job.lineage.transfers,
        step_s=_step_s_of_plan(job),
    )


def redone_s(state: ClusterState, job: Job, now: float, *, restore: bool) -> float:
    """Return the seconds of work that workers are expected to do again behind a change that is
    forced now: a part of the broken step, or all steps since the newest checkpoint."""
    step_s, progress = _usual_step_s(job), _progress(job, now)
    if restore:
        return step_s * (progress + outlook(state, job, now).behind_steps)
    return step_s * progress * (1 - job.lineage.salvage)


def _progress(job: Job, now: float) -> float:
    """Return the share of the step in progress that is done, as far as it is known."""
    step_s = _usual_step_s(job)
    if not step_s:
        return 0.0
    return min(1.0, max(0.0, (job.seen.unix(now) - job.seen.steps.recent[-1].time) / step_s))


def _usual_step_s(job: Job) -> float:
    """Return the median seconds of the last steps, since one of them may be odd; 0: none is
    known."""
    recent = job.seen.steps.recent
    return median(record.step_seconds for record in recent) if recent else 0.0


def _step_s_of_plan(job: Job) -> float | None:
    """Return the median seconds of the last steps under the running plan; None: none is known."""
    own = [one for one in job.seen.steps.recent if one.generation == job.current.generation]
    return median(record.step_seconds for record in own) if own else None


def racks_of_live(state: ClusterState) -> dict[NodeName, str]:
    """Return the label of each live node's rack; empty where it has none."""
    return {name: n.facts.rack for name, n in state.nodes.items() if n.registered}


def until_save_s(job: Job, now: float, interval_s: float) -> float:
    """Return the seconds until a checkpoint is due, `interval_s` after the last one or its
    request."""
    last = max(job.saves.checkpoint_at, job.saves.requested_at, job.started_at)
    return last + interval_s - job.seen.unix(now)


def save_interval_s(state: ClusterState, job: Job, now: float) -> float:
    """Return the best seconds between two checkpoints of a job with a plan."""
    assert job.current.made is not None, "asked of a job with a plan"
    losses = state.losses_until(job.seen.unix(now))
    racks = racks_of_live(state)
    exposure = Exposure.of(job.current.made.plan, racks=racks)
    nodes = max(1, len(job.current.members))
    wait_s = 1 / (losses.per_node_s(job.spec.recovery.mtbf_s) * nodes)
    share = exposure.share(losses.sizes, losses.rack_share(racks))
    between_s = wait_s / max(share, _LEAST_SHARE)
    saved = job.saves.checkpoint
    save_s = saved.seconds if saved is not None else _UNKNOWN_SAVE_S
    least_s = max(_LEAST_INTERVAL_S, _LEAST_SAVES * save_s)
    return min(max(best_interval_s(save_s, between_s), least_s), _MOST_INTERVAL_S)


def _saves(state: ClusterState, job: Job, now: float) -> tuple[float, float | None]:
    """Return the steps between two checkpoints, and the seconds until the next one; None: the job
    saves by steps, or saves fail."""
    spec = job.spec.checkpoint
    if spec is None:
        return _NEVER, None
    if spec.every != "auto":
        return spec.every, None
    step_s = _usual_step_s(job)
    if not step_s:
        return 1.0, None
    interval_s = save_interval_s(state, job, now)
    due_s = None if job.saves.failure else max(0.0, until_save_s(job, now, interval_s))
    return max(1.0, interval_s / step_s), due_s


# ---- Holders of state


def was_trained(state: ClusterState, job: Job) -> bool:
    """Return whether the model was trained, so that there is state to lose. After a restart of the
    master the step may be unknown, and the nodes that reported it may be gone. One node's report
    does not count while others of the plan are connected and have no step."""
    processes = job.current.processes()
    if job.current.stepped > NO_GENERATION or job.committed_step > 0:
        return True
    timeline, others = job.seen.timeline, set()
    agreed = timeline.joined if timeline is not None else {}
    reporters = {worker.node for worker, step in agreed.items() if step > 0}
    for name, node in state.nodes.items():
        status = node.seen.status
        if not node.connected or status.job_id != job.id:
            continue
        if any(worker.committed_step > 0 for worker in status.workers):
            reporters.add(name)
        elif any(processes.get(WorkerId(name, w.slot)) == w.incarnation for w in status.workers):
            others.add(name)
    return len(reporters) > 1 or (len(reporters) == 1 and not others - reporters)


def lost_layers(
    state: ClusterState, job: Job, plan: Plan, *, handed_over: bool = True
) -> LayerLost | None:
    """Return the layers of a trained model whose state no worker of `plan` holds; None: there are
    none. `handed_over`: workers on nodes that are being drained count too."""
    if not was_trained(state, job):
        return None
    try:
        workers = (*plan.workers, *(departing(state, job, plan) if handed_over else ()))
        require_holders(_held_layers(state, job, workers), plan.layer_count)
    except LayerLost as lost:
        return lost
    return None


def layers_away(state: ClusterState, job: Job) -> LayerLost | None:
    """Return the layers of a trained model whose state no connected worker holds; None: there are
    none."""
    if not was_trained(state, job):
        return None
    try:
        require_holders(
            _held_layers(state, job, _connected_workers(state, job)), job.spec.model.layer_count
        )
    except LayerLost as lost:
        return lost
    return None


def layers_gone(context: Context, job: Job) -> LayerLost | None:
    """Return the layers of a trained model whose state no worker holds and no node that is away
    can bring back; None: there are none."""
    if not was_trained(context.state, job):
        return None
    try:
        held = _held_layers(context.state, job, _connected_workers(context.state, job))
        require_holders(held | _held_away(context, job), job.spec.model.layer_count)
    except LayerLost as lost:
        return lost
    return None


def may_be_unreported(state: ClusterState, job: Job) -> bool:
    """Return whether agents may still send a report that explains the missing state: some state has
    no known holder, but all of it would have one if all connected workers had entered the newest
    plan."""
    if not was_trained(state, job) or job.current.made is None:
        return False
    here = _connected_workers(state, job)
    known = _held_layers(state, job, here)
    planned, members = job.current.made.plan.shards, job.current.processes()
    supposed = dict(known)
    for worker in here:
        status = state.nodes[worker.node].seen.status.worker(worker.slot)
        if status is not None and members.get(worker) == status.incarnation:
            supposed[worker] = known.get(worker, frozenset()) | planned[worker]
    layers = job.spec.model.layer_count
    return not _is_whole(known, layers) and _is_whole(supposed, layers)


def may_bring_back(context: Context, job: Job, layers: Iterable[int]) -> frozenset[NodeName]:
    """Return the nodes that are away and whose workers may hold some of `layers`."""
    wanted = frozenset(layers)
    away = _held_away(context, job)
    return frozenset(w.node for w, held in away.items() if any(s.layer in wanted for s in held))


def given_up_at(context: Context, job: Job) -> float | None:
    """Return when the wait for the next node that is away ends; None: no node is expected back."""
    names = {name for plan in job.lineage.plans.values() for name in plan.nodes}
    ends = (_may_return_until(context, job, name) for name in names)
    return min((end for end in ends if context.now < end < math.inf), default=None)


def departing(state: ClusterState, job: Job, plan: Plan) -> tuple[WorkerId, ...]:
    """Return the workers outside `plan` that can hand over their layers."""
    return tuple(
        WorkerId(name, worker.slot)
        for name, node in sorted(state.nodes.items())
        # The newest plan lacks those in `leaving`, even if their drain was undone meanwhile.
        if (node.moves_off or name in job.current.leaving)
        and node.connected
        and node.seen.status.job_id == job.id
        and name not in plan.nodes
        and name not in job.current.lost_nodes
        for worker in node.seen.status.workers
        if not job.seen.is_gone(worker.incarnation)
    )


def _connected_workers(state: ClusterState, job: Job) -> list[WorkerId]:
    """Return all connected workers of the job, in the plan or not."""
    return [
        WorkerId(name, worker.slot)
        for name, node in sorted(state.nodes.items())
        if node.connected and node.is_clear and name not in job.left_out
        if node.seen.status.job_id == job.id
        for worker in node.seen.status.workers
        if not job.seen.is_gone(worker.incarnation)
    ]


def _is_whole(held: Mapping[WorkerId, frozenset[Shard]], layer_count: int) -> bool:
    try:
        require_holders(held, layer_count)
    except LayerLost:
        return False
    return True


def _held_away(context: Context, job: Job) -> dict[WorkerId, frozenset[Shard]]:
    """Return the layers that workers on nodes that are away may hold, by any plan since the last
    step."""
    held: dict[WorkerId, frozenset[Shard]] = {}
    dead = job.current.lost_workers  # no plan has other processes in their slots yet
    for plan in job.lineage.plans.values():
        for worker, shards in plan.shards.items():
            if worker not in dead and context.now < _may_return_until(context, job, worker.node):
                held[worker] = held.get(worker, frozenset()) | shards
    return held


def _may_return_until(context: Context, job: Job, name: NodeName) -> float:
    """Return the time until which a node that is away may return with its workers. Time while the
    master was away does not count. A node that the journal has lost may return too."""
    node = context.state.nodes.get(name)
    if name in job.lineage.emptied or (node is not None and node.connected):
        return -math.inf
    if node is not None and node.registered:
        return math.inf
    lost_at = node.seen.lost_at if node is not None else None
    since = job.seen.since if lost_at is None else max(lost_at, job.seen.since)
    return since + context.retention.node_s


def _held_layers(
    state: ClusterState, job: Job, workers: Iterable[WorkerId]
) -> dict[WorkerId, frozenset[Shard]]:
    """Return the shards that each worker holds: by its newest entered plan, and by every plan since
    the last one with a committed step. Until the next committed step, a worker keeps layers that a
    newer plan takes away, and those received on the way into one."""
    shards: dict[Generation, ShardTable] = {}

    def planned(generation: Generation, worker: WorkerId) -> frozenset[Shard]:
        if generation not in job.lineage.plans:
            return frozenset()
        if generation not in shards:
            shards[generation] = job.lineage.plans[generation].shards
        return shards[generation].get(worker, frozenset())

    held = {}
    processes = {
        worker: process
        for worker in workers
        if (process := state.nodes[worker.node].seen.status.worker(worker.slot)) is not None
    }
    stepped_in = (process.stepped for process in processes.values())
    newest = max((job.seen.steps.furthest_in, *stepped_in))
    stepped, voted = job.lineage.plans.get(newest), _voted(job, newest)
    trained = max(newest, job.current.stepped)
    for worker, process in processes.items():
        reported = job.seen.processes.entered.get(process.incarnation, frozenset())
        entered = {process.generation, process.stepped, *reported}
        if voted.get(worker) == process.incarnation:
            entered.add(newest)
        last = max(entered)
        received = job.seen.processes.received.get(process.incarnation)
        own: frozenset[Shard] = frozenset()
        if received is not None and received.generation >= trained:
            of_plan = planned(received.generation, worker)
            own |= {shard for shard in of_plan if shard.layer in received.layers}
        if stepped is None or not _is_behind(worker, last, stepped):
            kept = {generation for generation in entered if generation >= trained}
            own = own.union(*(planned(at, worker) for at in {last, *kept}))
        held[worker] = own
    return held


def _voted(job: Job, generation: Generation) -> Mapping[WorkerId, Incarnation]:
    """Return the processes of a plan in which a step was committed. Each has entered it, even if
    its agent has not reported that, since a commit needs the vote of all."""
    for made in (job.current.made, job.current.trained):
        if made is not None and made.plan.generation == generation:
            return dict(zip(made.plan.workers, made.incarnations, strict=True))
    return {}


def _is_behind(worker: WorkerId, generation: Generation, stepped: Plan) -> bool:
    """Return whether a step committed in the plan `stepped` has outdated the worker's layers of
    `generation`. The workers of `stepped` have entered it."""
    return generation < stepped.generation and worker not in stepped.workers


# ---- Nodes: away, starting, ready


def is_away(context: Context, node: Node) -> bool:
    """Return whether the agent's stream has been closed for so long that the others do not wait for
    it."""
    closed_at = node.seen.closed_at
    return closed_at is not None and context.now >= closed_at + context.timing.away_s


def start_deadline(context: Context, node: Node) -> float:
    """Return the time until which the first plan waits for the node."""
    since = context.now if node.seen.assigned_at is None else node.seen.assigned_at
    return since + context.timing.start_timeout_s


def look_again(context: Context, node: Node) -> float:
    """Return when to check again whether the node is still worth waiting for."""
    closed_at = node.seen.closed_at
    if closed_at is None or is_away(context, node):
        return start_deadline(context, node)
    return min(start_deadline(context, node), closed_at + context.timing.away_s)


def is_up(state: ClusterState, worker: WorkerId) -> bool:
    """Return whether other workers can call the worker's process."""
    status = state.nodes[worker.node].seen.status.worker(worker.slot)
    return status is not None and status.card != ""


def nodes_starting(state: ClusterState, job: Job, nodes: Sequence[Node]) -> list[Node]:
    """Return those of `nodes`, members that are not ready, whose missing workers are all being
    started.

    Returns none where no worker is up for the next plan: then nothing is gained by waiting.
    """
    if not any(_has_worker_up(job, node) for node in state.candidates(job)):
        return []
    lost = {loss.incarnation for loss in job.current.losses if isinstance(loss, WorkerLost)}
    starting = []
    for node in nodes:
        status = node.seen.status
        here = [
            worker
            for worker in status.workers
            if not job.seen.is_gone(worker.incarnation) and worker.incarnation not in lost
        ]
        full = len(here) == node.facts.worker_slots
        if node.connected and status.job_id == job.id and full:
            starting.append(node)
    return starting


def _has_worker_up(job: Job, node: Node) -> bool:
    """Return whether a worker of the newest plan is up on the node."""
    mine = set(job.current.processes().values())
    return node.connected and any(
        worker.card and worker.incarnation in mine and not job.seen.is_gone(worker.incarnation)
        for worker in node.seen.status.workers
    )


def takes_longer(job: Job, node: Node) -> bool:
    """Return whether the replacement of a lost process on the node will take long. Either the
    replacement is late already, or the agent's last status lists none, though it forks one as soon
    as it may."""
    status = node.seen.status
    late = any(
        isinstance(loss, WorkerLost) and loss.late and loss.worker.node == node.facts.node
        for loss in job.current.losses
    )
    return late or (status.job_id == job.id and len(status.workers) < node.facts.worker_slots)


def split_by_data(state: ClusterState, ready: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """Split the `ready` nodes by data: nodes with the most common data (on a tie, the first
    node's), and all others."""
    counts = Counter(state.data_of(node) for node in ready)
    most = counts.most_common(1)[0][0] if counts else ""
    like = [node for node in ready if state.data_of(node) == most]
    return like, [node for node in ready if state.data_of(node) != most]


def ends_early(job: Job, node: NodeName) -> str:
    """Describe that the node's workers keep ending before they take part in a step; empty: they do
    not."""
    ends = job.seen.faults.stillborn.get(node, [])
    if len(ends) < _MOST_STILLBORN:
        return ""
    return (
        f"its workers ended {len(ends)} times before they had a part in a step; the last "
        f"time {describe_exit(ends[-1])}: {last_words(ends[-1])}"
    )


def quarantine_s(node: Node, first_s: float) -> float:
    """Return the length of the node's next quarantine, seconds; the first one lasts `first_s`."""
    return min(LONGEST_QUARANTINE_S, first_s * 2.0**node.failures.quarantines)


def names(nodes: Iterable[Node]) -> str:
    return comma_separated(node.facts.node for node in nodes)


def by_name(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.facts.node)


# ---- Drains


def draining_members(state: ClusterState, job: Job) -> list[Node]:
    """Return the members of the plan that are to be drained."""
    return [state.nodes[name] for name in job.current.members if state.nodes[name].moves_off]


def draining_nodes(state: ClusterState, job: Job) -> list[Node]:
    """Return the nodes to be drained that the job still needs. Nodes that the newest plan leaves
    out are needed until it has committed a step."""
    held = (state.nodes[name] for name in {*job.current.members, *job.current.leaving})
    return by_name([node for node in held if node.moves_off])


def is_undecided(state: ClusterState, node: Node) -> bool:
    """Return whether the planner has not decided yet if the node's work can move off it."""
    job, drain = state.job, node.drain
    if job is None or drain is None or job.state != "running":
        return False
    known = drain.save if drain.force else drain.kept
    return node.moves_off and node.facts.node in job.current.members and not known


def is_kept(node: Node) -> bool:
    """Return whether the node is to be drained but kept for now, and trains on."""
    return node.drain is not None and bool(node.drain.kept) and not node.drain.force


def usable_nodes(state: ClusterState, job: Job) -> list[Node]:
    """Return the ready nodes that a voluntary plan may use, by name; kept nodes are among them."""
    kept = [node for node in draining_members(state, job) if is_kept(node)]
    return by_name([n for n in (*state.candidates(job), *kept) if state.is_ready(n, job)])


def lowers_tolerance(job: Job, node: Node, without: Answer) -> bool:
    """Return whether the node's drain, unless forced, would leave a plan that can lose fewer nodes
    than the job asks for. Shadows that will follow count for an operator's drain, not for an
    optional one."""
    drain = node.drain
    if drain is None or drain.force or node.is_quarantined:
        return False
    if not node.is_out_as_sick and adds_holders(without.then or ""):
        return False
    return can_lose(without.found.plan) < job.spec.fault_tolerance


# ---- The job in recovery


def undisturbed(state: ClusterState, job: Job) -> bool:
    """Return whether the job trains with steps left, and no node is lost, away or being moved."""
    return (
        job.state == "running"
        and not job.seen.peers_lost
        and job.seen.steps.furthest_step < job.spec.training.steps
        and all(is_kept(node) for node in draining_members(state, job))
        and all(state.nodes[name].connected for name in job.current.members)
    )


def next_generation(context: Context, job: Job) -> Generation:
    """Return a generation above all known ones. For an adopted job, it is also above all that the
    lost head may have made since.

    Generations of another term are not counted. Agents that act on them follow another head, and
    this head must not make plans in that head's range.
    """
    first = context.state.history.first_generation
    if job.adopted_in is not None:
        first += (job.adopted_in // GENERATIONS_PER_TERM + 1) * GENERATIONS_PER_TERM
    own = range(first, first + GENERATIONS_PER_TERM)
    reported = (
        node.seen.status.generation
        for node in context.state.nodes.values()
        if node.connected and node.held is None and node.seen.status.job_id == job.id
        if node.seen.status.generation in own
    )
    return Generation(max(job.newest_known, *reported, first) + 1)


def first_peer_lost(job: Job) -> tuple[float, WorkerId, PeerLost] | None:
    """Return when workers of the newest generation first lost a peer, and the report. A worker that
    left on its own caused the others' losses, so its report is preferred to earlier ones."""
    lost = job.seen.peers_lost
    if not lost:
        return None
    _, _, worker = min((not report.left, at, worker) for worker, (at, report) in lost.items())
    return min(at for at, _ in lost.values()), worker, lost[worker][1]


def interval_s(job: Job, timing: Detection) -> float:
    """Return the seconds from the loss of a peer to the workers' next rendezvous. It doubles with
    each rendezvous that led to no step, up to a limit."""
    if job.current.newcomers:  # try again soon: a failed rendezvous leaves newcomers out
        return timing.regroup_s
    longest = max(timing.regroup_s, timing.longest_regroup_s)
    doublings = min(_MOST_DOUBLINGS, max(0, job.seen.since_step.regroups - 1))
    return min(longest, timing.regroup_s * float(2**doublings))


def stands_by_until(job: Job, worker: WorkerId) -> float:
    """Return the time, by this master's clock, before which the worker's rate must not be raised;
    0: none."""
    last, slow = job.stand_bys.get(worker), job.slow.get(worker)
    if last is None or slow is None or last.process != slow.incarnation:
        return 0.0
    return job.seen.stand_by_times[worker].until


def next_stand_by_end(context: Context, job: Job) -> float | None:
    """Return when the next stand-by worker's rate may be raised; None: no such time is ahead."""
    due = (
        stands_by_until(job, worker)
        for worker in job.slow
        if not job.current.has_member(worker.node)
    )
    return min((at for at in due if at > context.now), default=None)


# ---- Profiles


def key_of(job: Job, nodes: Sequence[Node]) -> str:
    """Return the key of the measurements that apply to `job` on `nodes`."""
    per_host = Counter[str]()
    for node in nodes:
        per_host[node.facts.hostname] += node.facts.worker_slots
    return profile_key(
        job.spec,
        devices=[node.facts.device_kind for node in nodes],
        worker_slots=nodes[0].facts.worker_slots,
        workers_per_host=max(per_host.values()),
        several_nodes=len(nodes) > 1,
    )


def unusable_profile(state: ClusterState, job: Job, ready: Sequence[Node], key: str) -> str:
    """Return why the stored profile of that key cannot be used for `job`; empty: it can."""
    why = state.unusable_profiles.get(key, "")
    if (stored := state.profiles.get(key)) is not None:
        try:
            check_measured(stored, job.spec, gpus_per_node=ready[0].facts.worker_slots)
        except ValueError as error:
            why = str(error)
    return f"profiles/{key}.json: {why}" if why else ""


def profile_of_adopted(state: ClusterState, job: Job, names: Iterable[NodeName]) -> ProfileChosen:
    """Return the profile of a job that was adopted in training: the stored one, or the estimate."""
    nodes = [state.nodes[name] for name in names]
    key = key_of(job, nodes)
    stored = state.profiles.get(key)
    if stored is None or unusable_profile(state, job, nodes, key):
        reason = "the master that had the job had measured it, and this one has not"
        return ProfileChosen(job_id=job.id, source="estimate", profile=None, key="", reason=reason)
    reason = f"profile {key}"
    return ProfileChosen(job_id=job.id, source="stored", profile=stored, key=key, reason=reason)

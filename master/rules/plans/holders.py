"""Holders of a model's state: who holds which layers, and who may still bring them back.

Derived from the plans that live workers have entered (`Lineage.plans`) and from their agents'
reports. Pure. Must not know what is decided by it.
"""

import math
from collections.abc import Iterable, Mapping

from oobleck.core.errors import LayerLost
from oobleck.core.ids import Generation, Incarnation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Shard, ShardTable, require_holders
from oobleck.master.rules.decision import Context
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import NO_GENERATION, Job


def lost_layers(
    state: ClusterState, job: Job, plan: Plan, *, handed_over: bool = True
) -> LayerLost | None:
    """The layers of a model that has been trained whose state is with nobody in `plan`.

    `handed_over`: nor with workers on nodes that are being drained, who can give it to the others.
    """
    if not was_trained(state, job):
        return None
    try:
        workers = (*plan.workers, *(departing(state, job, plan) if handed_over else ()))
        require_holders(_held_layers(state, job, workers), plan.layer_count)
    except LayerLost as lost:
        return lost
    return None


def gone_for_good(context: Context, job: Job) -> LayerLost | None:
    """The layers of a model that has been trained whose state no worker has any more, in the plan
    or not, nor can any node that is away bring back."""
    if not was_trained(context.state, job):
        return None
    try:
        held = _held_layers(context.state, job, _here(context.state, job))
        require_holders(held | _held_away(context, job), job.spec.model.layer_count)
    except LayerLost as lost:
        return lost
    return None


def may_be_untold(state: ClusterState, job: Job) -> bool:
    """Return whether agents may hold back a report that explains the missing state. That is so
    where some state has no known holder, but all of it would have one if all connected workers had
    entered the newest plan."""
    if not was_trained(state, job) or job.current.made is None:
        return False
    here = _here(state, job)
    known = _held_layers(state, job, here)
    planned, members = job.current.made.plan.shards, job.current.processes()
    supposed = dict(known)
    for worker in here:
        status = state.nodes[worker.node].seen.status.worker(worker.slot)
        if status is not None and members.get(worker) == status.incarnation:
            supposed[worker] = known.get(worker, frozenset()) | planned[worker]
    layers = job.spec.model.layer_count
    return not _is_whole(known, layers) and _is_whole(supposed, layers)


def _is_whole(held: Mapping[WorkerId, frozenset[Shard]], layer_count: int) -> bool:
    try:
        require_holders(held, layer_count)
    except LayerLost:
        return False
    return True


def _here(state: ClusterState, job: Job) -> list[WorkerId]:
    """Return all connected workers of the job, in the plan or not."""
    return [
        WorkerId(name, worker.slot)
        for name, node in sorted(state.nodes.items())
        if node.connected and node.is_clear and name not in job.left_out
        if node.seen.status.job_id == job.id
        for worker in node.seen.status.workers
        if not job.seen.is_gone(worker.incarnation)
    ]


def may_bring_back(context: Context, job: Job, layers: Iterable[int]) -> frozenset[NodeName]:
    """Nodes that are away and whose workers may hold some of `layers`."""
    wanted = frozenset(layers)
    away = _held_away(context, job)
    return frozenset(w.node for w, held in away.items() if any(s.layer in wanted for s in held))


def _held_away(context: Context, job: Job) -> dict[WorkerId, frozenset[Shard]]:
    """Return what workers on nodes that are away may hold, by any plan since the last step."""
    held: dict[WorkerId, frozenset[Shard]] = {}
    dead = job.current.lost_workers  # and no plan counts on others in their places yet
    for plan in job.lineage.plans.values():
        for worker, shards in plan.shards.items():
            if worker not in dead and context.now < _may_return_until(context, job, worker.node):
                held[worker] = held.get(worker, frozenset()) | shards
    return held


def given_up_at(context: Context, job: Job) -> float | None:
    """Return when the next node that is away stops being expected back; None: no node is
    expected."""
    names = {name for plan in job.lineage.plans.values() for name in plan.nodes}
    ends = (_may_return_until(context, job, name) for name in names)
    return min((end for end in ends if context.now < end < math.inf), default=None)


def _may_return_until(context: Context, job: Job, name: NodeName) -> float:
    """Return the time until which a node that is away may come back with its workers. Time while
    the master was away does not count. A node that the journal has lost may come back too."""
    node = context.state.nodes.get(name)
    if name in job.lineage.emptied or (node is not None and node.connected):
        return -math.inf
    if node is not None and node.registered:
        return math.inf
    lost_at = node.seen.lost_at if node is not None else None
    since = job.seen.since if lost_at is None else max(lost_at, job.seen.since)
    return since + context.retention.node_s


def departing(state: ClusterState, job: Job, plan: Plan) -> tuple[WorkerId, ...]:
    """Workers that `plan` is without, and that are there to hand over what they hold."""
    return tuple(
        WorkerId(name, worker.slot)
        for name, node in sorted(state.nodes.items())
        # One that may stay after all is still without a part in a plan that is not trained in yet.
        if (node.moves_off or name in job.current.leaving)
        and node.connected
        and node.seen.status.job_id == job.id
        and name not in plan.nodes
        and name not in job.current.lost_nodes
        for worker in node.seen.status.workers
        if not job.seen.is_gone(worker.incarnation)
    )


def was_trained(state: ClusterState, job: Job) -> bool:
    """Return whether the model was trained, so that there is state to lose. After a restart of the
    master the step may be unknown, and the nodes that reported it may be gone. One node's report
    does not count while others of the plan are connected and know of no step."""
    steps, processes = job.seen.steps, job.current.processes()
    if job.current.stepped > NO_GENERATION or max(steps.committed_step, steps.furthest_step) > 0:
        return True
    timeline, others = job.seen.timeline, set()
    agreed = timeline.joined if timeline is not None else {}
    told = {worker.node for worker, step in agreed.items() if step > 0}
    for name, node in state.nodes.items():
        status = node.seen.status
        if not node.connected or status.job_id != job.id:
            continue
        if any(worker.committed_step > 0 for worker in status.workers):
            told.add(name)
        elif any(processes.get(WorkerId(name, w.slot)) == w.incarnation for w in status.workers):
            others.add(name)
    return len(told) > 1 or (len(told) == 1 and not others - told)


def _is_behind(worker: WorkerId, generation: Generation, stepped: Plan) -> bool:
    """Return whether a step committed in `stepped` has outdated what the worker holds since
    `generation`. A worker that has a part in that plan has entered it."""
    return generation < stepped.generation and worker not in stepped.workers


def _voted(job: Job, generation: Generation) -> Mapping[WorkerId, Incarnation]:
    """Return the processes that a plan in which a step was committed counts on. Each has entered
    it, whether its agent has told so or not, since a commit needs the vote of all."""
    for made in (job.current.made, job.current.trained):
        if made is not None and made.plan.generation == generation:
            return dict(zip(made.plan.workers, made.incarnations, strict=True))
    return {}


def _held_layers(
    state: ClusterState, job: Job, workers: Iterable[WorkerId]
) -> dict[WorkerId, frozenset[Shard]]:
    """Return the shards that each worker holds: by the newest plan that it has entered, and by
    every one since the last plan with a committed step. Until the next step is committed, a worker
    keeps layers that a newer plan takes away, and those received on the way into one."""
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
    told = (process.stepped for process in processes.values())
    newest = max((job.seen.steps.furthest_in, *told))
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

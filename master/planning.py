"""Which plan is next: the planner's functions, asked with what the state holds.

Owns the questions to the planner (`oobleck.master.questions`), and who holds what of a plan's
layers. Pure. Must not know when a plan is due, nor how one is made.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from oobleck.master.cordon import moves_off
from oobleck.master.decision import Look
from oobleck.master.job import NO_GENERATION, Job
from oobleck.master.machines import Machines, profile_on, template_sizes
from oobleck.master.node import Node
from oobleck.master.nodeevents import NodeDrained, NodeLeftOut
from oobleck.master.questions import Answer, Changed, FirstPlan, Made, NextPlan, NoPlan
from oobleck.master.state import ClusterState
from oobleck.planner.errors import LayerLost, ModelTooLarge, PlanInfeasible
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.planner.reconfigure import Reconfiguration
from oobleck.planner.steptime import worker_peak_bytes
from oobleck.planner.transfer import Shard, ShardTable, plan_shards, require_holders
from oobleck.planner.units import count

A = TypeVar("A", Made, Changed)


def predicted_bytes(job: Job, nodes: Sequence[Node]) -> Mapping[WorkerId, int]:
    """The most memory that each worker of the job's plan takes, by the profile of the plan; none
    where there is no plan, or none of its `nodes` is there."""
    if job.made is None or not nodes:
        return {}
    return _predicted_bytes(job.made.plan, profile_on(job.spec, Machines.of(job, nodes)))


@lru_cache(maxsize=32)
def _predicted_bytes(plan: Plan, profile: Profile) -> Mapping[WorkerId, int]:
    return worker_peak_bytes(plan, profile)


def check_enough(job: Job, nodes: Sequence[Node]) -> None:
    """Raises PlanInfeasible where the job cannot start on `nodes`."""
    template_sizes(job.spec, Machines.of(job, nodes), len(nodes))


def never_fits(job: Job, nodes: Sequence[Node]) -> bool:
    """Whether no number of nodes like the largest of `nodes` could hold the job's model."""
    if not nodes:
        return False
    largest = max(nodes, key=lambda node: node.facts.memory_per_worker_bytes)
    try:
        check_enough(job, [largest])
    except ModelTooLarge:
        return True
    except PlanInfeasible:
        pass
    return False


def first_plan(look: Look, job: Job, nodes: Sequence[Node], generation: Generation) -> Plan:
    """Raises PlanInfeasible, StillPlanning."""
    question = FirstPlan(
        spec=job.spec,
        machines=Machines.of(job, nodes),
        nodes=tuple(node.facts.node for node in nodes),
        generation=generation,
    )
    return _expect(Made, look.planner.answer(question)).plan


def _expect(kind: type[A], answer: Answer) -> A:
    """Raises PlanInfeasible."""
    if isinstance(answer, NoPlan):
        raise PlanInfeasible(*answer.causes)
    if not isinstance(answer, kind):
        raise RuntimeError(f"{answer} is no {kind.__name__}")
    return answer


def idle_slots(plan: Plan, worker_slots: int) -> str:
    """How many of each node's slots have no part in `plan`, and why; empty: none."""
    used = max(worker.slot for worker in plan.workers) + 1
    if used >= worker_slots:
        return ""
    return (
        f"{worker_slots - used} of {count(worker_slots, 'worker slot')} per node stay idle: the "
        f"model's {count(plan.layer_count, 'layer')} make no pipeline that uses more than {used}"
    )


def next_plan(
    look: Look, job: Job, live: Sequence[Node], generation: Generation
) -> Reconfiguration:
    """The plan after `job`'s newest one, on `live`. Raises StillPlanning, and PlanInfeasible, also
    where a layer of a model that has been trained has no holder in the new plan, and there is no
    checkpoint."""
    if job.made is None:
        raise ValueError(f"job {job.id} has no plan to reconfigure")
    question = NextPlan(
        spec=job.spec,
        machines=Machines.of(job, live),
        plan=_base(job, job.made.plan),
        nodes=tuple(node.facts.node for node in live),
        most_nodes=max(job.most_nodes, len(live)),
        generation=generation,
    )
    found = _expect(Changed, look.planner.answer(question)).found
    if not job.has_checkpoint and (lost := lost_layers(look.state, job, found.plan)) is not None:
        away = ", ".join(sorted(_may_bring_back(look.state, job)))
        hope = f"only {away} with the workers of before can bring it back; or " if away else ""
        fix = "cancel the job and submit it again, since there is no checkpoint"
        raise PlanInfeasible(*lost.causes, hope + fix) from lost
    return found


def _may_bring_back(state: ClusterState, job: Job) -> frozenset[NodeName]:
    """Nodes that are away, and had a part in the plans since the last step that is known of."""
    drained = {loss.node for loss in job.losses if isinstance(loss, NodeDrained)}
    trained = {node for plan in job.plans.values() for node in plan.nodes}
    away = {node for node in trained if node in state.nodes and not state.nodes[node].connected}
    return (job.lost_nodes | away) - drained


def _base(job: Job, newest: Plan) -> Plan:
    """The plan to change: with a newcomer that is left out, what it was to change is undone."""
    if job.astray:
        return job.plans[job.newest_known]
    undone = any(isinstance(loss, NodeLeftOut) for loss in job.losses)
    return job.trained.plan if undone and job.trained is not None else newest


def lost_layers(
    state: ClusterState, job: Job, plan: Plan, *, handed_over: bool = True
) -> LayerLost | None:
    """The layers of a model that has been trained whose state is with nobody in `plan`.

    `handed_over`: nor with workers on nodes that are being drained, who can give it to the others.
    """
    if _committed_step(state, job) == 0:
        return None
    try:
        workers = (*plan.workers, *(departing(state, job, plan) if handed_over else ()))
        require_holders(_held_layers(state, job, workers), plan.layer_count)
    except LayerLost as lost:
        return lost
    return None


def departing(state: ClusterState, job: Job, plan: Plan) -> tuple[WorkerId, ...]:
    """Workers that `plan` is without, and that are there to hand over what they hold."""
    return tuple(
        WorkerId(name, worker.slot)
        for name, node in sorted(state.nodes.items())
        # One that may stay after all is still without a part in a plan that is not trained in yet.
        if (moves_off(node) or name in job.leaving)
        and node.connected
        and node.seen.status.job_id == job.id
        and name not in plan.nodes
        and name not in job.lost_nodes
        for worker in node.seen.status.workers
        if not job.seen.is_gone(worker.incarnation)
    )


def _committed_step(state: ClusterState, job: Job) -> int:
    """The last committed step that anyone tells of."""
    told = (
        worker.committed_step
        for node in state.nodes.values()
        if node.connected and node.seen.status.job_id == job.id
        for worker in node.seen.status.workers
    )
    way = job.seen.way
    agreed = 0 if way is None else way.committed_step or 0
    return max(job.seen.committed_step, agreed, *told, 0)


def _is_behind(worker: WorkerId, generation: Generation, stepped: Plan) -> bool:
    """Whether a step that some of the others have committed, in `stepped`, has made what the worker
    holds since `generation` worthless. Whoever has a part in that plan has entered it."""
    return generation < stepped.generation and worker not in stepped.workers


def _held_layers(
    state: ClusterState, job: Job, workers: Iterable[WorkerId]
) -> dict[WorkerId, frozenset[Shard]]:
    """What the workers bring along from the newest generation that each has entered, and from those
    since the last one that a step was committed in: until another is, they keep what plans take
    away."""
    shards: dict[Generation, ShardTable] = {}

    def planned(generation: Generation, worker: WorkerId) -> frozenset[Shard]:
        if generation not in job.plans:
            return frozenset()
        if generation not in shards:
            shards[generation] = plan_shards(job.plans[generation])
        return shards[generation].get(worker, frozenset())

    held = {}
    processes = {
        worker: process
        for worker in workers
        if (process := state.nodes[worker.node].seen.status.worker(worker.slot)) is not None
    }
    newest = max((process.stepped for process in processes.values()), default=NO_GENERATION)
    stepped = job.plans.get(newest)
    for worker, process in processes.items():
        reported = job.seen.entered.get(process.incarnation, frozenset())
        entered = {process.generation, process.stepped, *reported}
        last = max(entered)
        if stepped is not None and _is_behind(worker, last, stepped):
            continue
        kept = {generation for generation in entered if generation >= max(newest, job.stepped)}
        held[worker] = frozenset().union(*(planned(at, worker) for at in {last, *kept}))
    return held

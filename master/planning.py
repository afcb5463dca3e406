"""Which plan is next: the planner's functions, asked with what the state holds.

Pure, and remembered: the same question within a process is answered from memory, since the loop
asks again whenever anything changes. Must not know when a plan is due.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from oobleck.master.cordon import moves_off
from oobleck.master.job import Job
from oobleck.master.node import Node
from oobleck.master.nodeevents import NodeDrained, NodeLeftOut
from oobleck.master.state import ClusterState
from oobleck.planner.catalogue import Catalogue, Offer
from oobleck.planner.choose import keep_schedule, with_residents
from oobleck.planner.errors import LayerLost, ModelTooLarge, PlanInfeasible
from oobleck.planner.estimate import estimate_profile
from oobleck.planner.firstplan import make_first_plan
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.memory import budget_bytes
from oobleck.planner.plan import Plan
from oobleck.planner.profile import InvalidProfile, Profile
from oobleck.planner.reconfigure import Reconfiguration, can_lose, reconfigure
from oobleck.planner.specification import node_specification, on_usable_gpus
from oobleck.planner.steptime import worker_peak_bytes
from oobleck.planner.transfer import Shard, ShardTable, plan_shards, require_holders
from oobleck.planner.units import count

__all__ = [
    "Machines",
    "can_lose",
    "check_enough",
    "first_plan",
    "idle_slots",
    "next_plan",
    "predicted_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What planning has to know of the nodes that it may use."""

    worker_slots: int
    memory_bytes: int
    #: The job's profile; None: the estimate.
    profile: Profile | None = None

    @classmethod
    def of(cls, job: Job, nodes: Sequence[Node]) -> "Machines":
        """The weakest of `nodes` counts, since any of them may get any stage."""
        if not nodes:
            raise PlanInfeasible("no node is ready; start oobleck-agent on the machines to use")
        limit = job.spec.resources.memory_per_worker_bytes
        return cls(
            worker_slots=nodes[0].facts.worker_slots,
            memory_bytes=limit or min(node.facts.memory_per_worker_bytes for node in nodes),
            profile=job.profile.profile if job.profile is not None else None,
        )


@lru_cache(maxsize=32)
def _profile(spec: JobSpec, machines: Machines) -> Profile:
    limit = spec.resources.memory_per_worker_bytes
    try:
        if machines.profile is not None:
            memory = budget_bytes(limit, machines.memory_bytes)
            profile = replace(machines.profile, gpu_memory_bytes=memory)
        else:
            profile = estimate_profile(
                spec,
                gpus_per_node=machines.worker_slots,
                memory_per_worker_bytes=machines.memory_bytes,
            )
    except InvalidProfile as error:  # of a model beyond all machines
        raise ModelTooLarge(f"the model's profile: {error}") from error
    return on_usable_gpus(
        profile, gpus=machines.worker_slots, min_nodes=spec.resources.min_nodes_per_pipeline
    )


@lru_cache(maxsize=128)
def _sizes(spec: JobSpec, machines: Machines, nodes: int) -> range:
    return node_specification(
        _profile(spec, machines),
        nodes=nodes,
        fault_tolerance=spec.fault_tolerance,
        min_nodes=spec.resources.min_nodes_per_pipeline,
    )


@lru_cache(maxsize=8)
def _catalogue(profile_of_any_memory: Profile, tied: bool) -> Catalogue:
    return Catalogue(tied=tied)


def _known(spec: JobSpec, profile: Profile) -> Catalogue:
    return _catalogue(replace(profile, gpu_memory_bytes=1), spec.model.tied)


def predicted_bytes(job: Job, nodes: Sequence[Node]) -> Mapping[WorkerId, int]:
    """The most memory that each worker of the job's plan takes, by the profile of the plan; none
    where there is no plan, or none of its `nodes` is there."""
    if job.made is None or not nodes:
        return {}
    return _predicted_bytes(job.made.plan, _profile(job.spec, Machines.of(job, nodes)))


@lru_cache(maxsize=32)
def _predicted_bytes(plan: Plan, profile: Profile) -> Mapping[WorkerId, int]:
    return worker_peak_bytes(plan, profile)


def check_enough(job: Job, nodes: Sequence[Node]) -> None:
    """Raises PlanInfeasible where the job cannot start on `nodes`."""
    _sizes(job.spec, Machines.of(job, nodes), len(nodes))


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


def first_plan(job: Job, nodes: Sequence[Node], generation: Generation) -> Plan:
    """Raises PlanInfeasible."""
    machines = Machines.of(job, nodes)
    spec, profile = job.spec, _profile(job.spec, machines)
    made = make_first_plan(
        _known(spec, profile),
        _sizes(spec, machines, len(nodes)),
        [node.facts.node for node in nodes],
        profile=profile,
        microbatches=spec.training.microbatches,
        min_pipelines=spec.fault_tolerance + 1,
        generation=generation,
        tied=spec.model.tied,
        wanted=spec.training.wanted_schedule,
    )
    _rehearse(made.plan, made.offer, profile, spec.fault_tolerance)
    return made.plan


def idle_slots(plan: Plan, worker_slots: int) -> str:
    """How many of each node's slots have no part in `plan`, and why; empty: none."""
    used = max(worker.slot for worker in plan.workers) + 1
    if used >= worker_slots:
        return ""
    return (
        f"{worker_slots - used} of {count(worker_slots, 'worker slot')} per node stay idle: the "
        f"model's {count(plan.layer_count, 'layer')} make no pipeline that uses more than {used}"
    )


def _rehearse(plan: Plan, offer: Offer, profile: Profile, fault_tolerance: int) -> None:
    """Plan for the loss of a node of each size of pipeline, for the judge to have seen what it
    will be asked about when that happens."""
    for pipeline in {len(pipeline.nodes): pipeline for pipeline in plan.pipelines}.values():
        with suppress(PlanInfeasible):
            reconfigure(
                plan,
                [node for node in plan.nodes if node != pipeline.nodes[0]],
                templates=offer.templates,
                profile=profile,
                fault_tolerance=fault_tolerance,
                generation=Generation(plan.generation + 1),
                judge=offer.judge,
                costs=offer.costs,
            )


@lru_cache(maxsize=32)
def _reconfigured(
    spec: JobSpec,
    machines: Machines,
    plan: Plan,
    live: tuple[NodeName, ...],
    most_nodes: int,
    generation: Generation,
) -> Reconfiguration | tuple[str, ...]:
    """Or the causes why there is no plan: an exception would keep what its frames hold."""
    try:
        profile = _profile(spec, machines)
        offer = _known(spec, profile).offer(profile, _sizes(spec, machines, most_nodes), plan)
        found = reconfigure(
            plan,
            live,
            templates=offer.templates,
            profile=profile,
            fault_tolerance=spec.fault_tolerance,
            generation=generation,
            judge=offer.judge,
            costs=offer.costs,
        )
        return replace(found, plan=with_residents(keep_schedule(found.plan, profile), profile))
    except PlanInfeasible as infeasible:
        return infeasible.causes


def next_plan(
    state: ClusterState, job: Job, live: Sequence[Node], generation: Generation
) -> Reconfiguration:
    """The plan after `job`'s newest one, on `live`. Raises PlanInfeasible, also where a layer
    of a model that has been trained has no holder in the new plan, and there is no checkpoint."""
    if job.made is None:
        raise ValueError(f"job {job.id} has no plan to reconfigure")
    machines = Machines.of(job, live)
    answer = _reconfigured(
        job.spec,
        machines,
        _base(job, job.made.plan),
        tuple(node.facts.node for node in live),
        max(job.most_nodes, len(live)),
        generation,
    )
    if isinstance(answer, tuple):
        raise PlanInfeasible(*answer)
    if not job.has_checkpoint and (lost := lost_layers(state, job, answer.plan)) is not None:
        gone = {loss.node for loss in job.losses if isinstance(loss, NodeDrained)}
        away = ", ".join(sorted(job.lost_nodes - gone))
        hope = f"only {away} with the workers of before can bring it back; or " if away else ""
        fix = "cancel the job and submit it again, since there is no checkpoint"
        raise PlanInfeasible(*lost.causes, hope + fix) from lost
    return answer


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


def _held_layers(
    state: ClusterState, job: Job, workers: Iterable[WorkerId]
) -> dict[WorkerId, frozenset[Shard]]:
    """What the workers bring along from the generations that they have entered."""
    shards: dict[Generation, ShardTable] = {}
    held = {}
    for worker in workers:
        process = state.nodes[worker.node].seen.status.worker(worker.slot)
        if process is None:
            continue
        reported = job.seen.entered.get(process.incarnation, process.generation)
        generation = max(reported, process.generation)
        entered = job.plans.get(generation)
        if entered is not None:
            if generation not in shards:
                shards[generation] = plan_shards(entered)
            held[worker] = shards[generation].get(worker, frozenset())
    return held

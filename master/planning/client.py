"""Client of the planner: builds planning requests from the state, and reads the replies.

Owns the requests to the planner (`oobleck.master.planning.requests`). Pure. Must not know when a
plan is due, nor how one is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec

from oobleck.core.errors import ModelTooLarge, PlanInfeasible
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.plan import Plan, WorkerRate, pipelines_within
from oobleck.core.profile import Profile
from oobleck.core.ties import Ties
from oobleck.core.units import count
from oobleck.master.events.jobs import PlanMade
from oobleck.master.events.nodes import NodeLeftOut
from oobleck.master.planning.requests import (
    Broken,
    FirstPlanReply,
    FirstPlanRequest,
    Infeasible,
    Machines,
    NextPlanReply,
    NextPlanRequest,
    Planner,
    PlanningFailed,
    profile_on,
    racks_of,
    template_sizes,
)
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.cost.estimate import worker_peak_bytes
from oobleck.planner.cost.listed import estimate_listed
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.chooser import Candidates, choose
from oobleck.planner.recovery.course import PLAIN, VOLUNTARY, PlanWanted
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.report.planning import Planning
from oobleck.planner.search.firstplan import node_specification, on_usable_gpus


def predicted_bytes(job: Job, nodes: Sequence[Node]) -> Mapping[WorkerId, int]:
    """Return each worker's predicted peak memory under the job's plan, by the plan's profile. Empty
    if there is no plan, or `nodes` has none of its nodes."""
    if job.current.made is None or not nodes:
        return {}
    profile = profile_on(job.spec, Machines.of(job, nodes))
    return _predicted_bytes(job.current.made.plan, profile, tied=job.spec.model.ties)


@lru_cache(maxsize=32)
def _predicted_bytes(plan: Plan, profile: Profile, *, tied: Ties) -> Mapping[WorkerId, int]:
    if plan.listing is not None:
        return estimate_listed(plan, profile, tied=tied).worker_bytes
    return worker_peak_bytes(plan, profile)


def check_enough(job: Job, nodes: Sequence[Node]) -> None:
    """Check that the job can start on `nodes`. Raises PlanInfeasible."""
    template_sizes(job.spec, Machines.of(job, nodes), len(nodes))


def needs_shadows(job: Job, nodes: Sequence[Node]) -> bool:
    """Return whether `nodes` are too few for a first plan of templates alone. Raises PlanInfeasible
    where the job cannot start on them."""
    smallest = template_sizes(job.spec, Machines.of(job, nodes), len(nodes)).start
    return len(nodes) < (job.spec.fault_tolerance + 1) * smallest


def never_fits(job: Job, nodes: Sequence[Node]) -> bool:
    """Return whether the job's model fits no number of nodes like the largest of `nodes`."""
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


def exceeds_profile(job: Job) -> str:
    """Return why the job's model fits no number of nodes like those of the profile that the job
    names; empty: it may fit, or the job names none."""
    chosen = job.profiling.chosen
    if chosen is None or chosen.profile is None:
        return ""
    resources, profile = job.spec.resources, chosen.profile
    memory = resources.memory_per_worker_bytes or profile.gpu_memory_bytes
    least = resources.min_nodes_per_pipeline
    try:
        node_specification(
            on_usable_gpus(
                replace(profile, gpu_memory_bytes=memory),
                gpus=profile.gpus_per_node,
                min_nodes=least,
            ),
            nodes=len(profile.layers),
            fault_tolerance=0,
            min_nodes=least,
        )
    except ModelTooLarge as infeasible:
        return f"by its profile {'; '.join(infeasible.causes)}"
    except PlanInfeasible:
        pass
    return ""


def first_plan(planner: Planner, job: Job, nodes: Sequence[Node], generation: Generation) -> Plan:
    """Ask for the job's first plan. Raises PlanInfeasible, StillPlanning."""
    request = FirstPlanRequest(
        spec=job.spec,
        machines=Machines.of(job, nodes),
        nodes=tuple(node.facts.node for node in nodes),
        generation=generation,
        racks=racks_of(nodes),
    )
    reply = planner.reply(request)
    if isinstance(reply, Infeasible):
        raise PlanInfeasible(*reply.causes)
    if not isinstance(reply, FirstPlanReply):
        raise RuntimeError(f"{reply} is no first plan")
    return reply.plan


def idle_slots(plan: Plan, worker_slots: int) -> str:
    """Describe how many slots per node `plan` leaves idle, and why; empty: none."""
    used = max(worker.slot for worker in plan.workers) + 1
    if used >= worker_slots:
        return ""
    return (
        f"{worker_slots - used} of {count(worker_slots, 'worker slot')} per node stay idle: the "
        f"model's {count(plan.layer_count, 'layer')} make no pipeline that uses more than {used}"
    )


def next_plan(
    planner: Planner,
    job: Job,
    live: Sequence[Node],
    generation: Generation,
    wanted: PlanWanted,
    outlook: Outlook,
) -> Answer:
    """Ask for the plans that may replace `job`'s newest one on `live`, and return the best by the
    outlook. Raises StillPlanning, PlanInfeasible.

    If planning fails by an internal error, plain templates are planned for a forced change. Raises
    PlanningFailed if they fail too, or if the change is voluntary.
    """
    made = job.current.made
    if made is None:
        raise ValueError(f"job {job.id} has no plan to reconfigure")
    plan, base = _plans(job, made)
    request = NextPlanRequest(
        spec=job.spec,
        machines=Machines.of(job, live),
        plan=plan,
        base=None if base is plan else base,
        wanted=wanted,
        rates=tuple(WorkerRate(worker=w, rate=rate) for w, rate in sorted(job.rates.items())),
        nodes=tuple(node.facts.node for node in live),
        most_nodes=max(job.lineage.most_nodes, len(live)),
        generation=generation,
        racks=racks_of(live),
    )
    try:
        return choose(_candidates(planner, request), outlook)
    except PlanningFailed as failed:
        if wanted in VOLUNTARY:
            raise
        plain = msgspec.structs.replace(request, wanted=PLAIN)
        answer = choose(_candidates(planner, plain), outlook)
        reason = f"{answer.found.reason}; {failed}"
        return replace(answer, found=replace(answer.found, reason=reason))


def planning(job: Job, nodes: Sequence[Node], outlook: Outlook) -> Planning:
    """Return the inputs of `next_plan` for the job's newest plan on `nodes`. Raises
    PlanInfeasible."""
    made = job.current.made
    if made is None:
        raise PlanInfeasible(f"job {job.id} has no plan")
    plan, base = _plans(job, made)
    spec, machines = job.spec, Machines.of(job, nodes)
    sizes = template_sizes(spec, machines, max(job.lineage.most_nodes, len(nodes)))
    return Planning(
        plan=plan,
        base=base,
        profile=profile_on(spec, machines),
        least_nodes=sizes.start,
        most_nodes=sizes.stop - 1,
        fault_tolerance=spec.fault_tolerance,
        tied=spec.model.ties,
        schedule_named=spec.training.wanted_schedule is not None,
        shadows=spec.recovery.shadows == "auto",
        policy=spec.recovery.policy,
        outlook=outlook,
        racks=racks_of(nodes),
        nodes=tuple(node.facts.node for node in nodes),
        rates=tuple(WorkerRate(worker=w, rate=rate) for w, rate in sorted(job.rates.items())),
    )


def _candidates(planner: Planner, request: NextPlanRequest) -> Candidates:
    """Ask for the requested plans. Raises StillPlanning, PlanInfeasible."""
    reply = planner.reply(request)
    if isinstance(reply, Infeasible):
        raise PlanInfeasible(*reply.causes)
    if isinstance(reply, Broken):
        raise PlanningFailed(request.wanted, reply)
    if not isinstance(reply, NextPlanReply):
        raise RuntimeError(f"{reply} is no next plan")
    return reply.candidates


def _plans(job: Job, made: PlanMade) -> tuple[Plan, Plan]:
    """Return the plan to change, and its base (`CurrentPlan.base`). A plan that no worker has
    entered is skipped, since workers do not hold its layers yet. If the newest plan's newcomer is
    left out, its change is undone."""
    current = job.current
    undone = any(isinstance(loss, NodeLeftOut) for loss in current.losses)
    if job.astray:
        plan = job.lineage.plans[job.newest_known]
    elif job.unentered and current.trained is not None:
        return current.trained.plan, current.trained_base or current.trained.plan
    elif undone and current.trained is not None:
        plan = current.trained.plan
    else:
        return made.plan, current.base or made.plan
    return plan, pipelines_within(plan)

"""Application of events of plans: a job's new generation, and its first step.

Must not know how plans are made, nor what losses they answer.
"""

from typing import Any

import msgspec

from oobleck.core.ids import Incarnation
from oobleck.core.plan import Plan, pipelines_within
from oobleck.master.events.plans import (
    FirstStepCommitted,
    FollowUpDropped,
    PlanEvent,
    PlanFound,
    PlanMade,
)
from oobleck.master.state import stand_by
from oobleck.master.state.cluster import ClusterState, version_pairs
from oobleck.master.state.job import KNOWN_PROCESSES, Job
from oobleck.master.state.job_observed import LossSeen, RecoveryTimeline
from oobleck.master.state.job_states import move


def apply(state: ClusterState, event: PlanEvent, now: float, unix: float) -> None:
    job = state.jobs[event.job_id]
    match event:
        case PlanFound():
            job.lineage.plans[event.plan.generation] = event.plan
            job.lineage.emptied.difference_update(event.plan.nodes)
        case PlanMade():
            move(job, event)
            told = version_pairs(state.versions_of(event.plan.nodes))
            job.lineage.mixed = tuple(sorted({*job.lineage.mixed, *told}))
            _make_plan(job, event, now, unix)
        case FirstStepCommitted():
            move(job, event)
            _step(state, job, event, unix)
        case FollowUpDropped():
            made = job.current.made
            if made is not None and made.plan.generation == event.generation:
                job.current.made = msgspec.structs.replace(made, then="")


def _make_plan(job: Job, event: PlanMade, now: float, unix: float) -> None:
    seen = job.seen
    loss = seen.loss or LossSeen(now - event.detect_s, now)
    job.current.waited_s = max(0.0, unix - job.waiting_since) if job.waiting_since else 0.0
    job.waiting_since = 0.0
    seen.timeline = None  # of one that is adopted, others have seen the way
    if event.rule != "adopt":
        seen.timeline = RecoveryTimeline(
            evidence_at=loss.evidence_at,
            declared_at=loss.declared_at,
            pushed_at=now,
            waited_s=job.current.waited_s,
        )
    seen.loss = None
    if job.current.made is not None:
        job.lineage.before = job.current.made.plan
        job.lineage.reconfigurations += 1
    if not event.boundary:
        job.current.abrupt = event.plan.generation
        seen.peers_lost.clear()
    if event.cause in ("worker lost", "peers lost", "no progress"):
        seen.since_step.regroups += 1
        if seen.since_step.fruitless_since is None:
            seen.since_step.fruitless_since = now
    if event.cause == "no progress" and event.rule == "regroup":
        seen.since_step.stalls += 1
    seen.progressed_at = seen.planned_at = now
    seen.inherited = False
    for node in event.plan.nodes:
        job.left_out.pop(node, None)  # an adopted plan may have one that was let in again
    _note_replaced(job, event)
    stand_bys = stand_by.after_plan(job.stand_bys, event, job.current.processes(), unix)
    job.set_stand_bys(stand_bys, now, unix)
    job.current.base = _base(job, event)
    job.current.made, job.current.made_at = event, unix
    job.reason = event.reason
    job.current.losses = ()
    job.lineage.most_nodes = max(job.lineage.most_nodes, len(event.plan.nodes))
    job.lineage.plans[event.plan.generation] = event.plan
    job.lineage.emptied.difference_update(event.plan.nodes)


def _base(job: Job, event: PlanMade) -> Plan | None:
    """`event` is the plan that follows `job.current.made`."""
    before, base = job.current.made, job.current.base
    if event.passes_over:
        before, base = job.current.trained, job.current.trained_base
    if event.is_base or (event.policy == "shadow" and base is None):
        return None
    if event.rule == "adopt" or before is None:
        return pipelines_within(event.plan)  # the journal lacks what it came from
    return base or before.plan


def _note_replaced(job: Job, event: PlanMade) -> None:
    """`event` is the plan that follows `job.current.made`."""
    before = job.current.made.incarnations if job.current.made is not None else ()
    job.lineage.replaced |= {process: rank == 0 for rank, process in enumerate(before)}
    for process in event.incarnations:
        job.lineage.replaced.pop(process, None)
    while len(job.lineage.replaced) > KNOWN_PROCESSES:
        del job.lineage.replaced[next(iter(job.lineage.replaced))]


def _step(state: ClusterState, job: Job, event: FirstStepCommitted, unix: float) -> None:
    job.current.trained, job.current.trained_base = job.current.made, job.current.base
    for node in job.current.members:
        job.seen.faults.stillborn.pop(node, None)
    job.lineage.plans = {g: plan for g, plan in job.lineage.plans.items() if g >= event.generation}
    # Whatever they have reported by now: a step is committed by all or by none.
    entered = dict.fromkeys(job.current.processes().values(), frozenset({event.generation}))
    for process, before in job.seen.processes.entered.items():
        entered[process] = entered.get(process, frozenset()) | (before & job.lineage.plans.keys())
    job.seen.processes.entered = entered
    job.seen.processes.received = {
        process: received
        for process, received in job.seen.processes.received.items()
        if received.generation in job.lineage.plans
    }
    if job.state == "running":
        job.reason = ""
    if event.step >= job.rollback.redo_until:
        job.rollback.redo_until = 0
    job.seen.timeline = None
    _forget_processes(state, job)
    if job.started_at == 0.0:
        job.started_at = unix


def _forget_processes(state: ClusterState, job: Job) -> None:
    """Forget observations of processes that neither the plan nor any agent knows."""
    known = set(job.current.processes().values())
    known |= {w.incarnation for node in state.nodes.values() for w in node.seen.status.workers}
    seen = job.seen.processes
    by_process: tuple[dict[Incarnation, Any], ...] = (
        seen.exits,
        seen.hung,
        seen.entered,
        seen.received,
        seen.finished,
    )
    for told in by_process:
        for process in told.keys() - known:
            del told[process]

"""Application of events of jobs and of their plans, except losses.

Losses are in `oobleck.master.state.reducer.apply_nodes`. Must not know how plans are made, nor what
losses they answer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from oobleck.core.ids import Incarnation, JobId, WorkerId
from oobleck.core.plan import Plan, pipelines_within
from oobleck.master.events import jobs
from oobleck.master.events.nodes import NodeYielded
from oobleck.master.state.cluster import ClusterState, version_pairs
from oobleck.master.state.job import (
    KNOWN_LOST,
    KNOWN_PROCESSES,
    KNOWN_REPORTS,
    KNOWN_REQUESTS,
    NO_GENERATION,
    Job,
)
from oobleck.master.state.job_observed import JobSeen, LossSeen, ProfilingSeen, RecoveryTimeline
from oobleck.master.state.job_states import move
from oobleck.master.state.node import Node
from oobleck.master.state.pace import StandBy
from oobleck.master.state.slowdowns import slow_after
from oobleck.planner.recovery.course import base_behind
from oobleck.planner.recovery.outlook import (
    corrected,
    learned_pause_s,
    learned_s,
    learned_share,
    received_s,
)


def apply(state: ClusterState, event: jobs.JobEvent, now: float, unix: float) -> None:
    match event:
        case jobs.JobSubmitted():
            state.jobs[event.job_id] = _submitted(event, now, unix, state.sequence)
            state.requests[event.request_id] = event.job_id
            state.submissions += 1
        case jobs.JobAdopted():
            _adopt(state, event, now, unix)
        case jobs.JobCancelRequested():
            state.jobs[event.job_id].cancel_requested = True
        case jobs.CheckpointRequested():
            _ask_for_checkpoint(state.jobs[event.job_id], event, unix)
        case jobs.CheckpointPublished() | jobs.SaveProblem() | jobs.JobRestored():
            _note_save(state.jobs[event.job_id], event, now, unix)
        case jobs.JobCaughtUp():
            state.jobs[event.job_id].rollback.redo_until = 0
        case jobs.RateChanged():
            _note_rate(state, state.jobs[event.job_id], event, now, unix)
        case jobs.RecordsDiffer():
            pass  # only for operators, who may drain one of them
        case jobs.RecordsLost():
            lost = state.jobs[event.job_id].lost
            lost.steps += len(event.steps)
            lost.last = (*lost.last, event)[-KNOWN_LOST:]
        case jobs.JobStarted() | jobs.JobPutBack() | jobs.JobWaiting():
            _take_turn(state, state.jobs[event.job_id], event, now, unix)
        case jobs.MeasuringStarted() | jobs.ProfileChosen():
            _measure(state.jobs[event.job_id], event, now)
        case jobs.JobSucceeded() | jobs.JobFailed() | jobs.JobCancelled():
            _end(state, state.jobs[event.job_id], event, unix)
        case jobs.JobForgotten():
            del state.requests[state.jobs.pop(event.job_id).request_id]


def _note_rate(
    state: ClusterState, job: Job, event: jobs.RateChanged, now: float, unix: float
) -> None:
    last, slow = job.stand_bys.get(event.worker), job.slow.get(event.worker)
    if last is not None and last.process != event.incarnation:
        del job.stand_bys[event.worker]
    elif last is not None and slow is not None and event.rate > slow.rate:
        job.set_stand_bys({**job.stand_bys, event.worker: last.better(unix)}, now, unix)
    job.slow = slow_after(state, job, event)


def _adopt(state: ClusterState, event: jobs.JobAdopted, now: float, unix: float) -> None:
    """Add an adopted job. It has trained, so it is treated as after a restart of the master."""
    state.jobs[event.job_id] = Job(
        id=event.job_id,
        request_id=event.request_id,
        spec=event.spec,
        submitted_at=unix,
        submitted_in=state.sequence,
        adopted_in=event.generation,
        seen=JobSeen(since=now, since_unix=unix, clock=unix - now, inherited=True),
    )
    state.requests[event.request_id] = event.job_id
    state.submissions += 1
    for name in event.nodes:
        state.nodes[name].held = None


def _submitted(event: jobs.JobSubmitted, now: float, unix: float, sequence: int) -> Job:
    job = Job(
        id=event.job_id,
        request_id=event.request_id,
        spec=event.spec,
        submitted_at=unix,
        submitted_in=sequence,
        profile_only=event.profile_only,
        seen=JobSeen(clock=unix - now),
    )
    if event.profile is not None:
        job.profiling.chosen = jobs.ProfileChosen(
            job_id=job.id,
            source="file",
            profile=event.profile,
            key="",
            reason=event.spec.profile,
        )
    return job


def _ask_for_checkpoint(job: Job, event: jobs.CheckpointRequested, unix: float) -> None:
    job.saves.requested, job.saves.requested_at = event.number, unix
    job.saves.numbers[event.request_id] = event.number
    while len(job.saves.numbers) > KNOWN_REQUESTS:
        del job.saves.numbers[next(iter(job.saves.numbers))]


def _note_save(
    job: Job,
    event: jobs.CheckpointPublished | jobs.SaveProblem | jobs.JobRestored,
    now: float,
    unix: float,
) -> None:
    match event:
        case jobs.CheckpointPublished():
            # An agent that was away may report an earlier checkpoint later.
            if _is_newest(job, event.saved.step):
                job.saves.checkpoint, job.saves.failure = event.saved, ""
                job.saves.checkpoint_at = unix
            job.saves.known = (*job.saves.known, event.saved)[-KNOWN_REPORTS:]
            job.saves.answered = max(job.saves.answered, event.saved.request)
        case jobs.SaveProblem():
            job.saves.failure = event.failed.reason
            job.saves.known = (*job.saves.known, event.failed)[-KNOWN_REPORTS:]
            job.saves.answered = max(job.saves.answered, event.failed.request)
        case jobs.JobRestored():
            job.rollback.restored = event.restored
            step = event.restored.step
            if event.resumed:
                job.rollback.resumed_step = step
                steps = job.seen.steps
                steps.committed_step = max(steps.committed_step, step)
                steps.recorded_step = max(steps.recorded_step, step)
            elif event.lost_steps:
                job.rollback.redo_until = max(job.rollback.redo_until, step + event.lost_steps)
            job.seen.steps.furthest_step, job.seen.steps.furthest_in = step, NO_GENERATION
            job.seen.steps.claimed.clear()
            job.seen.progressed_at = now
    job.seen.save_reports = tuple(r for r in job.seen.save_reports if not job.knows(r))


def _is_newest(job: Job, step: int) -> bool:
    """Return whether a checkpoint of `step` replaces the newest one, also after a return to an
    older one."""
    newest, restored = job.saves.checkpoint, job.rollback.restored
    if newest is None or step >= newest.step:
        return True
    return restored is not None and restored.step < newest.step


def _take_turn(
    state: ClusterState,
    job: Job,
    event: jobs.JobStarted | jobs.JobPutBack | jobs.JobWaiting,
    now: float,
    unix: float,
) -> None:
    before, why = job.state, job.reason
    move(job, event)
    match event:
        case jobs.JobStarted():
            state.active = job.id
            _release(state, job.id)
            if job.current.made is None:
                job.waiting_since = 0.0
        case jobs.JobPutBack():
            state.active, job.passed_over = None, True
            job.profiling.under_way = None
            job.reason = f"{why}; {event.instead} has its turn meanwhile"
            if (made := job.current.made) is None:
                job.waiting_since = 0.0
            else:
                nodes = {worker.node for worker in (*made.plan.workers, *made.leaving)}
                yielded = (NodeYielded(job_id=job.id, node=name) for name in sorted(nodes))
                job.current.losses = tuple(yielded)
        case jobs.JobWaiting():
            job.profiling.under_way = None
            job.waiting_since = job.waiting_since or unix
            if before != "waiting for nodes":
                job.seen.waiting_since = now
            job.reason = "; ".join(event.causes)


def _release(state: ClusterState, job_id: JobId) -> list[Node]:
    """Release and return the nodes that were held for a queued job."""
    nodes = [node for node in state.held.get(job_id, []) if node.held and node.held.queued]
    for node in nodes:
        node.held = None
    return nodes


def _measure(job: Job, event: jobs.MeasuringStarted | jobs.ProfileChosen, now: float) -> None:
    move(job, event)
    match event:
        case jobs.MeasuringStarted():
            job.profiling.under_way, job.profiling.attempts = event, event.wish.attempt
            job.seen.profiling = ProfilingSeen(measuring_since=now)
        case jobs.ProfileChosen():
            job.profiling.chosen, job.profiling.under_way = event, None
            job.seen.profiling.measuring_since = None


def _forget_what_led_there(job: Job) -> None:
    """Drop most of an ended job's history: with a thousand nodes it takes over a megabyte."""
    plans = [*job.lineage.plans.values(), *filter(None, [job.lineage.before])]
    job.lineage.had_part = frozenset(name for plan in plans for name in plan.nodes)
    job.lineage.before, job.lineage.plans = None, {}
    job.current.base = job.current.trained_base = None
    seen = job.seen
    seen.timeline = None
    seen.processes.entered.clear()
    seen.processes.received.clear()
    seen.processes.finished.clear()
    seen.profiling.measured.clear()
    seen.peers_lost.clear()


def _end(state: ClusterState, job: Job, event: jobs.JobEnded, unix: float) -> None:
    move(job, event)
    job.reason = event.reason if isinstance(event, jobs.JobFailed) else ""
    job.finished_at = unix
    job.profiling.under_way = None
    job.current.losses = ()
    job.waiting_since = 0.0
    _forget_what_led_there(job)
    if state.active == job.id:
        state.active = None
    for node in _release(state, job.id):
        node.stale_workers = node.registered
    for other in state.jobs.values():
        other.passed_over = False


def apply_plan(state: ClusterState, event: jobs.PlanEvent, now: float, unix: float) -> None:
    job = state.jobs[event.job_id]
    match event:
        case jobs.PlanFound():
            job.lineage.plans[event.plan.generation] = event.plan
            job.lineage.emptied.difference_update(event.plan.nodes)
        case jobs.PlanMade():
            move(job, event)
            versions = version_pairs(state.versions_of(event.plan.nodes))
            job.lineage.mixed = tuple(sorted({*job.lineage.mixed, *versions}))
            _make_plan(job, event, now, unix)
        case jobs.FirstStepCommitted():
            move(job, event)
            _step(state, job, event, unix)
        case jobs.FollowUpDropped():
            made = job.current.made
            if made is not None and made.plan.generation == event.generation:
                job.current.made = msgspec.structs.replace(made, then="")


def _make_plan(job: Job, event: jobs.PlanMade, now: float, unix: float) -> None:
    seen = job.seen
    loss = seen.loss or LossSeen(now - event.detect_s, now)
    job.current.waited_s = max(0.0, unix - job.waiting_since) if job.waiting_since else 0.0
    job.waiting_since = 0.0
    seen.timeline = None  # this master has not seen the transition into an adopted plan
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
        job.left_out.pop(node, None)  # an adopted plan may have a node that was let in again
    _note_replaced(job, event)
    stand_bys = _stand_bys_after(job.stand_bys, event, job.current.processes(), unix)
    job.set_stand_bys(stand_bys, now, unix)
    job.current.base = _base(job, event)
    job.current.made, job.current.made_at = event, unix
    job.reason = event.reason
    job.current.losses = ()
    job.lineage.most_nodes = max(job.lineage.most_nodes, len(event.plan.nodes))
    job.lineage.plans[event.plan.generation] = event.plan
    job.lineage.emptied.difference_update(event.plan.nodes)


def _base(job: Job, event: jobs.PlanMade) -> Plan | None:
    """Return the base of `event`, the plan after `job.current.made`."""
    before, base = job.current.made, job.current.base
    if event.passes_over:
        before, base = job.current.trained, job.current.trained_base
    if event.rule == "adopt" or before is None:  # its base is unknown
        plan, base = pipelines_within(event.plan), None
    else:
        plan = before.plan
    return base_behind(plan, base, policy=event.policy, rule=event.rule)


def _note_replaced(job: Job, event: jobs.PlanMade) -> None:
    """Note the processes that `event`, the plan after `job.current.made`, replaces."""
    before = job.current.made.incarnations if job.current.made is not None else ()
    job.lineage.replaced |= {process: rank == 0 for rank, process in enumerate(before)}
    for process in event.incarnations:
        job.lineage.replaced.pop(process, None)
    while len(job.lineage.replaced) > KNOWN_PROCESSES:
        del job.lineage.replaced[next(iter(job.lineage.replaced))]


def _step(state: ClusterState, job: Job, event: jobs.FirstStepCommitted, unix: float) -> None:
    job.current.trained, job.current.trained_base = job.current.made, job.current.base
    for node in job.current.members:
        job.seen.faults.stillborn.pop(node, None)
    job.lineage.plans = {g: plan for g, plan in job.lineage.plans.items() if g >= event.generation}
    # All have entered it, even if some have not reported so: a step is committed by all or by none.
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
    _learn(job, event.transition)


#: Causes of changes that wait for no process to start.
_ONLY_CHANGE: frozenset[jobs.Cause] = frozenset(
    {"node lost", "node left out", "peers lost", "no progress"}
)


def _learn(job: Job, transition: jobs.ReconfigurationStats) -> None:
    """Update what is expected of changes: how long they and their transfers take, how long a return
    takes, and how much of a broken step is kept."""
    made, lineage, phases = job.current.made, job.lineage, transition.phases
    if made is None or transition.master_restarted or made.anew:
        return
    moved_s, met_s = phases.get("transfer", 0.0), phases.get("rendezvous", 0.0)
    expected = made.expected
    if made.boundary:
        if expected is not None:
            pause_s = met_s + moved_s - expected.stall_s
            lineage.switch_s = learned_pause_s(lineage.switch_s, pause_s)
        return
    abort_s = phases.get("abort", 0.0)
    if made.restore:  # workers load before they say that they have met
        back_s = abort_s + met_s + moved_s - lineage.rejoin_s
        if back_s > 0 and not made.starting:
            lineage.back_s = learned_s(lineage.back_s, back_s)
        return
    if transition.redo_step is not None:
        kept = transition.salvaged_microbatches / made.plan.microbatches
        lineage.salvage = learned_share(lineage.salvage, kept)
    if made.cause in _ONLY_CHANGE and not made.starting:
        lineage.rejoin_s = learned_s(lineage.rejoin_s, abort_s + met_s)
    if expected is not None and expected.transfer_s is not None:
        lineage.transfers = corrected(
            lineage.transfers,
            expected_s=received_s(
                expected.transfer_s,
                expected_bytes=expected.moved_bytes,
                received_bytes=transition.received_bytes,
            ),
            happened_s=moved_s,
        )


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
    for observations in by_process:
        for process in observations.keys() - known:
            del observations[process]


def _stand_bys_after(
    known: Mapping[WorkerId, StandBy],
    event: jobs.PlanMade,
    before: Mapping[WorkerId, Incarnation],
    unix: float,
) -> dict[WorkerId, StandBy]:
    """Return the stand-by records after `event`, without processes that it replaces."""
    workers = frozenset(event.plan.workers)
    records: dict[WorkerId, StandBy] = {}
    for worker, one in known.items():
        joins = worker in workers and worker not in before
        records[worker] = replace(one, better_at=unix) if joins and one.better_at else one
    for each in event.stand_by_for:
        records[each.worker] = StandBy(
            process=each.incarnation, seconds=each.seconds, until=unix + each.seconds
        )
    return records

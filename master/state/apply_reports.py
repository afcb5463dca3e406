"""How observed events change the `seen` part of the state. Nothing here outlives the process."""

import msgspec

from oobleck.master.events.reports import (
    AgentRefused,
    EvaluationReceived,
    Observed,
    ProfilesFound,
    RecordsReceived,
    RecordsWait,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    Tick,
    WorkerReported,
)
from oobleck.master.state import evidence, progress, worker_reports
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job_observed import JobSeen, LossSeen
from oobleck.proto.types import Assignment

replace = msgspec.structs.replace

#: A tick that is less late than this is not lateness.
_LATE_S = 1e-3


def observe(state: ClusterState, event: Observed, now: float) -> bool:
    """Returns whether anything changed that a decision could depend on."""
    match event:
        case StreamOpened():
            _open(state, event, now)
        case StreamClosed():
            return _close(state, event, now)
        case AgentRefused():
            _note_rival(state, event, now)
            return False
        case StatusReceived():
            return progress.take_status(state, state.nodes[event.node], event.status, now)
        case ProfilesFound():
            state.profiles = dict(event.profiles)
            state.unusable_profiles = dict(event.unusable)
        case RecordsReceived():
            progress.take_records(state.jobs[event.job_id], event.records, now)
        case RecordsWait():
            state.jobs[event.job_id].seen.steps.records_wait = event.waiting
        case EvaluationReceived():
            job = state.jobs[event.job_id]
            job.seen.steps.evaluation = event.record
            progress.note_progress(job, event.record.generation, now)
        case Tick():
            if event.late_s > _LATE_S:
                _postpone(state, event, now)
        case WorkerReported():
            return worker_reports.hear(state, event, now)
    return True


def _open(state: ClusterState, event: StreamOpened, now: float) -> None:
    node = state.nodes[event.node]
    node.seen.session, node.seen.running = event.session, _told(state, event.running)
    node.seen.opened_at, node.seen.heard_before = now, node.seen.last_heard
    if state.job is not None:
        evidence.forget_stream(state.job, event.node)
    node.seen.closed_at = None
    node.seen.awaited = False
    progress.take_status(state, node, event.status, now)


def _told(state: ClusterState, running: Assignment | None) -> Assignment | None:
    if running is None or not state.lacks(running):
        return None
    for node in state.nodes.values():
        known = node.seen.running
        if known is not None and known.job_id == running.job_id and known.assign == running.assign:
            return replace(running, assign=known.assign)
    return running


def _close(state: ClusterState, event: StreamClosed, now: float) -> bool:
    node = state.nodes[event.node]
    if node.seen.session != event.session:
        return False  # a newer stream has replaced it
    node.seen.session = None
    node.seen.closed_at = node.seen.cut_at = now
    evidence.note_closed(state, event, now)
    return True


def _note_rival(state: ClusterState, event: AgentRefused, now: float) -> None:
    seen = state.nodes[event.node].seen if event.node in state.nodes else None
    if seen is not None and (seen.rival is None or seen.rival[0] != event.incarnation):
        seen.rival = event.incarnation, now


def _postpone(state: ClusterState, event: Tick, now: float) -> None:
    """What came meanwhile may still stand in the queue: that time counts for nobody."""
    for node in state.nodes.values():
        node.seen.last_heard = min(node.seen.last_heard + event.late_s, now)
        node.seen.awaited |= event.cut
        if event.cut:
            node.seen.resumed_at = now
    if state.job is not None:
        _postpone_job(state.job.seen, event.late_s, now)


def _postpone_job(seen: JobSeen, late_s: float, now: float) -> None:
    if (loss := seen.loss) is not None:
        seen.loss = LossSeen(loss.evidence_at, min(loss.declared_at + late_s, now))
    if seen.planned_at is not None:
        seen.planned_at = min(seen.planned_at + late_s, now)
    if seen.progressed_at is not None:
        seen.progressed_at = min(seen.progressed_at + late_s, now)
    if seen.profiling.measuring_since is not None:
        seen.profiling.measuring_since = min(seen.profiling.measuring_since + late_s, now)

"""How observed events change the `seen` part of the state. Nothing here outlives the process."""

from oobleck.host.messages import (
    CheckpointSaved,
    Measured,
    PhaseReached,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.master import isolation, sightings
from oobleck.master.job import Job
from oobleck.master.jobseen import JobSeen
from oobleck.master.node import Node
from oobleck.master.observations import (
    AgentRefused,
    EvaluationReceived,
    MeasurementReported,
    Observed,
    PeerLostReported,
    PhaseReported,
    ProfilesFound,
    RecordsReceived,
    SaveReported,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    Tick,
    WorkerExitReported,
    WorkerFailedReported,
    WorkerHungReported,
)
from oobleck.master.state import ClusterState
from oobleck.planner.ids import Generation, WorkerId
from oobleck.proto.types import NodeStatus, WorkerStatus

#: A tick that is less late than this is not lateness.
_LATE_S = 1e-3


def observe(state: ClusterState, event: Observed, now: float) -> bool:
    """Returns whether anything changed that a decision could depend on."""
    match event:
        case StreamOpened():
            node = state.nodes[event.node]
            node.seen.session, node.seen.running = event.session, event.running
            if state.job is not None:
                sightings.forget_stream(state.job, event.node)
            node.seen.closed_at = None
            node.seen.awaited = False
            _take_status(state, node, event.status, now)
            return True
        case AgentRefused():
            seen = state.nodes[event.node].seen if event.node in state.nodes else None
            if seen is not None and (seen.rival is None or seen.rival[0] != event.incarnation):
                seen.rival = event.incarnation, now
            return False
        case StreamClosed():
            node = state.nodes[event.node]
            if node.seen.session != event.session:
                return False  # a newer stream has replaced it
            node.seen.session = None
            node.seen.closed_at = now
            sightings.note(state, event, now)
            return True
        case StatusReceived():
            return _take_status(state, state.nodes[event.node], event.status, now)
        case WorkerExitReported():
            job = state.jobs[event.job_id]
            if event.incarnation in job.seen.exits:
                return False
            if _is_stale(job, event):
                if job.on_the_way:  # it may be what the way is the answer to
                    sightings.note(state, event, now)
                return False
            job.seen.exits[event.incarnation] = event.exited
            sightings.note(state, event, now)
            if job.counts_on(event.incarnation):
                job.seen.deaths.setdefault(event.worker, []).append(event.exited)
            elif event.incarnation in job.processes().values():
                job.seen.stillborn.setdefault(event.worker.node, []).append(event.exited)
            return _hear(state, event.worker, now)
        case WorkerHungReported():
            job = state.jobs[event.job_id]
            if job.seen.is_gone(event.incarnation) or _is_stale(job, event):
                return False
            job.seen.hung[event.incarnation] = event.hung
            sightings.note(state, event, now)
            return _hear(state, event.worker, now)
        case PhaseReported():
            job = state.jobs[event.job_id]
            if not _is_stale(job, event):
                _take_phase(job, event.worker, event.phase, now)
            return _hear(state, event.worker, now)
        case PeerLostReported():
            job = state.jobs[event.job_id]
            # Workers may still be in an older generation than a plan for a step boundary.
            in_time = job.abrupt <= event.lost.generation <= job.generation
            if in_time and not _is_stale(job, event):
                job.seen.peers_lost.setdefault(event.worker, (now, event.lost))
                isolation.note(state, job, event.worker, event.lost)
                sightings.note(state, event, now)
            return _hear(state, event.worker, now)
        case WorkerFailedReported():
            job = state.jobs[event.job_id]
            if _is_stale(job, event):
                return False
            sightings.note(state, event, now)
            if not job.counts_on(event.incarnation):
                job.seen.unfit.setdefault(event.worker.node, event.message)
            elif event.kind == "internal":
                job.seen.complaints[event.worker] = event.message
            elif event.kind == "node":
                job.seen.ailing.setdefault(event.worker.node, (now, event.message))
            elif job.seen.failure is None:
                job.seen.failure = event.message
            return _hear(state, event.worker, now)
        case MeasurementReported():
            _take_measurement(state.jobs[event.job_id], event)
            return _hear(state, event.worker, now)
        case SaveReported():
            job = state.jobs[event.job_id]
            if _is_stale(job, event):
                return False
            if isinstance(event.what, SaveFailed):
                job.seen.progressed_at = now  # it is tried again and again
            if job.knows(event.what) or event.what in job.seen.save_reports:
                return False
            job.seen.save_reports = (*job.seen.save_reports, event.what)
            return True
        case ProfilesFound():
            state.profiles = dict(event.profiles)
            state.unusable_profiles = dict(event.unusable)
            return True
        case RecordsReceived():
            _take_records(state.jobs[event.job_id], event.records, now)
            return True
        case EvaluationReceived():
            job = state.jobs[event.job_id]
            job.seen.evaluation = event.record
            _note_progress(job, event.record.generation, now)
            return True
        case Tick():
            if event.late_s > _LATE_S:
                # What came meanwhile may still stand in the queue: that time counts for nobody.
                for node in state.nodes.values():
                    node.seen.last_heard = min(node.seen.last_heard + event.late_s, now)
                    node.seen.awaited |= event.cut
                    if event.cut:
                        node.seen.resumed_at = now
                if state.job is not None:
                    _postpone(state.job.seen, event.late_s, now)
            return True


def _postpone(seen: JobSeen, late_s: float, now: float) -> None:
    if seen.planned_at is not None:
        seen.planned_at = min(seen.planned_at + late_s, now)
    if seen.progressed_at is not None:
        seen.progressed_at = min(seen.progressed_at + late_s, now)
    if seen.measuring_since is not None:
        seen.measuring_since = min(seen.measuring_since + late_s, now)


def _hear(state: ClusterState, worker: WorkerId, now: float) -> bool:
    seen = state.nodes[worker.node].seen
    seen.last_heard, seen.awaited = now, False
    return True


def _take_measurement(job: Job, event: MeasurementReported) -> None:
    """Only what the newest attempt asked for counts."""
    measuring, found = job.measuring, event.measured
    if measuring is None or found.attempt != measuring.wish.attempt:
        return
    if (event.worker, event.incarnation) not in measuring.workers:
        return
    if isinstance(found, Measured):
        job.seen.measured[event.incarnation] = found
    else:
        job.seen.links_measured[found.scope] = found


def _take_status(state: ClusterState, node: Node, status: NodeStatus, now: float) -> bool:
    seen = node.seen
    seen.last_heard, seen.awaited = now, False
    changed = _without_progress(status) != _without_progress(seen.status)
    before, seen.status = seen.status, status
    job = state.job
    ready = job is not None and state.is_ready(node, job)
    if ready != (seen.ready_at is not None):
        seen.ready_at = now if ready else None
        changed = True
    if job is not None and status.job_id == job.id:
        for worker in status.workers:
            last = before.worker(worker.slot)
            if last is not None and last.incarnation == worker.incarnation:
                _take_beats(job, last, worker, now)
            changed |= _take_progress(job, worker, now)
    return changed


def _without_progress(status: NodeStatus) -> tuple[object, ...]:
    """The status without what changes with every heartbeat and decides nothing by itself."""
    workers = ((w.slot, w.incarnation, w.store, w.generation, w.finished) for w in status.workers)
    node = (status.job_id, status.generation, status.leaving, status.trouble)
    return (*node, status.failed_starts, *workers)


def _take_progress(job: Job, worker: WorkerStatus, now: float) -> bool:
    """Returns whether it shows the first step of a generation that does known steps again."""
    seen = job.seen
    if job.restored is not None and worker.generation < job.restored.generation:
        return False  # how far it came before the others went back says nothing any more
    if worker.finished and seen.finished.get(worker.incarnation) != worker.generation:
        seen.finished[worker.incarnation] = worker.generation
        _note_progress(job, worker.generation, now)
    _note_step(job, worker.committed_step, worker.generation, now)
    return job.on_the_way and worker.generation == job.generation and _redoes(job, worker)


def _take_beats(job: Job, before: WorkerStatus, worker: WorkerStatus, now: float) -> None:
    """In a step that takes long, its instructions show that it gets on."""
    if worker.beats != before.beats:
        _note_progress(job, worker.generation, now)


def _redoes(job: Job, worker: WorkerStatus) -> bool:
    """Records of steps that were recorded before do not come again: statuses must tell of them."""
    step, seen = worker.committed_step, job.seen
    if not 0 <= step <= seen.committed_step:
        return False
    first = step
    if seen.redone is not None and seen.redone[0] == worker.generation:
        first = seen.redone[1]
    seen.redone = worker.generation, first, step
    return step > first


def _note_step(job: Job, step: int, generation: Generation, now: float) -> None:
    if step > job.seen.furthest_step:
        job.seen.furthest_step = step
        _note_progress(job, generation, now)


def _note_progress(job: Job, generation: Generation, now: float) -> None:
    """What older generations still do is no way forward for a newer one that waits for them."""
    if generation >= job.generation:
        job.seen.progressed_at = now


def _is_stale(
    job: Job,
    event: WorkerExitReported
    | WorkerHungReported
    | PhaseReported
    | PeerLostReported
    | WorkerFailedReported
    | SaveReported,
) -> bool:
    """Whether it is of a process that another one has replaced, and tells nothing that still
    counts: a checkpoint that is newer than all known ones does, and an answer that is due."""
    if not job.is_replaced(event.worker, event.incarnation):
        return False
    if isinstance(event, SaveReported) and not isinstance(event.what, Restored):
        due = event.what.request > job.save_answered
        newest = 0 if job.checkpoint is None else job.checkpoint.step
        newer = isinstance(event.what, CheckpointSaved) and event.what.step > newest
        return not (due or newer)
    return True


def _take_phase(job: Job, worker: WorkerId, reached: PhaseReached, now: float) -> None:
    if reached.phase == "transferred" and (process := job.processes().get(worker)) is not None:
        before = job.seen.entered.get(process, reached.generation)
        job.seen.entered[process] = max(before, reached.generation)
    way = job.seen.way
    _note_progress(job, reached.generation, now)
    if way is None or reached.generation != job.generation:
        return
    match reached.phase:
        case "aborted":
            if job.made is None or worker not in job.made.starting:
                way.aborted_at = now  # others have nothing to leave
            way.answered.add(worker)
        case "joined":
            way.joined_at = now
            way.joined.add(worker)
            way.committed_step = reached.committed_step
            way.redo = way.redo or reached.redo
            way.rolled_forward = way.rolled_forward or reached.rolled_forward
            way.salvaged_microbatches = reached.salvaged_microbatches
        case "transferred":
            way.transferred_at = now
            way.entered.add(worker)
            way.received_bytes += reached.received_bytes


def _take_records(job: Job, records: tuple[StepRecord, ...], now: float) -> None:
    """`records` follow on those before."""
    seen = job.seen
    for record in records:
        seen.committed_step = record.step
        seen.recent.append(record)
        _note_step(job, record.step, record.generation, now)
        way = seen.way
        if way is not None and way.first_step_at is None and record.generation >= job.generation:
            way.first_step_at = now
    if records:
        seen.recorded_at = now
        seen.deaths.clear()
        seen.given_up.clear()
        seen.complaints.clear()
        seen.regroups = seen.stalls = 0
        seen.fruitless_since = None
        seen.no_way.clear()

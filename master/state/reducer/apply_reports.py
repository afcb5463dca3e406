"""Application of observed events to the `seen` part of the state: streams, time, and progress of
nodes and jobs by statuses and records. Nothing here outlives the process.

Other reports of workers are in `oobleck.master.state.reducer.worker_reports`. Must not know what a
lack of progress leads to (`oobleck.master.rules.stalls`).
"""

from collections.abc import Iterator
from heapq import nlargest

import msgspec

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.messages import StepRecord
from oobleck.master.events.unions import (
    AgentRefused,
    EvaluationReceived,
    NodesIdle,
    Observed,
    ProfilesFound,
    RecordsReceived,
    RecordsWait,
    RestoreReceived,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    Tick,
    WorkerReported,
)
from oobleck.master.state import evidence
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import JobSeen, LossSeen, SinceStep, StepsSeen
from oobleck.master.state.node import Held, Node, NodeSeen
from oobleck.master.state.pace import Reading
from oobleck.master.state.reducer.worker_reports import hear, hear_save, note_entered, note_progress
from oobleck.proto.types import Assignment, NodeStatus, WorkerStatus

#: Least delay that counts as lateness, seconds.
_LATE_S = 1e-3


def observe(state: ClusterState, event: Observed, now: float) -> bool:
    """Apply an observation, and return whether anything changed that a decision could depend on."""
    match event:
        case StreamOpened():
            _open(state, event, now)
        case StreamClosed():
            return _close(state, event, now)
        case AgentRefused():
            _note_rival(state, event, now)
            return False
        case StatusReceived():
            return _take_status(state, state.nodes[event.node], event.status, now)
        case ProfilesFound():
            state.profiles = dict(event.profiles)
            state.unusable_profiles = dict(event.unusable)
        case RecordsReceived():
            _take_records(state.jobs[event.job_id], event, now)
        case RecordsWait():
            state.jobs[event.job_id].seen.steps.records_wait = event.waiting
        case EvaluationReceived():
            job = state.jobs[event.job_id]
            job.seen.steps.evaluation = event.record
            note_progress(job, event.record.generation, now)
        case RestoreReceived():
            return hear_save(state.jobs[event.job_id], event.restored, now)
        case NodesIdle():
            state.jobs[event.job_id].seen.why_idle = event.why
        case Tick():
            if event.late_s > _LATE_S:
                _postpone(state, event, now)
        case WorkerReported():
            return hear(state, event, now)
    return True


def _open(state: ClusterState, event: StreamOpened, now: float) -> None:
    node = state.nodes[event.node]
    node.seen.session, node.seen.running = (
        event.session,
        _running_to_keep(state, event.running, node.held),
    )
    if event.acted_on is not None and state.history.id == event.acted_on.history:
        lacking = state.history.lacks(event.acted_on, state.sequence)
        if lacking > (state.behind[0] if state.behind is not None else 0):
            state.behind = lacking, event.node
    node.seen.opened_at, node.seen.heard_before = now, node.seen.last_heard
    if state.job is not None:
        evidence.forget_stream(state.job, event.node)
    node.seen.closed_at = None
    node.seen.awaited = False
    _take_status(state, node, event.status, now)


def _running_to_keep(
    state: ClusterState, running: Assignment | None, held: Held | None
) -> Assignment | None:
    """Return the assignment that the agent runs if the journal may lack its plan; nodes that report
    the same plan share one `Assign`."""
    if running is None:
        return None
    if not state.lacks(running) and (held is None or held.job_id != running.job_id):
        return None
    for node in state.nodes.values():
        known = node.seen.running
        if known is not None and known.job_id == running.job_id and known.assign == running.assign:
            return msgspec.structs.replace(running, assign=known.assign)
    return running


def _close(state: ClusterState, event: StreamClosed, now: float) -> bool:
    node = state.nodes[event.node]
    if node.seen.session != event.session:
        return False  # replaced by a newer stream
    node.seen.session = None
    node.seen.closed_at = node.seen.cut_at = now
    evidence.note_closed(state.job, event, now)
    return True


def _note_rival(state: ClusterState, event: AgentRefused, now: float) -> None:
    if event.follows is not None:
        state.superseded = event.follows, event.node
        return
    seen = state.nodes[event.node].seen if event.node in state.nodes else None
    if seen is not None and (seen.rival is None or seen.rival[0] != event.incarnation):
        seen.rival = event.incarnation, now


def _postpone(state: ClusterState, event: Tick, now: float) -> None:
    """Extend leases and deadlines by the loop's delay, since messages may still be queued."""
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


def _take_status(state: ClusterState, node: Node, status: NodeStatus, now: float) -> bool:
    seen = node.seen
    seen.hear(now)
    changed = _without_progress(status) != _without_progress(seen.status)
    before, seen.status = seen.status, status
    _note_starts(seen, before, now)
    if seen.running is not None and seen.running.job_id != status.job_id:
        seen.running = None  # it has got a newer assignment since
    job = state.job
    ready = job is not None and state.is_ready(node, job)
    if ready != (seen.ready_at is not None):
        seen.ready_at = now if ready else None
        changed = True
    if job is not None and status.job_id == job.id and node.held is None:
        for worker in status.workers:
            last = before.worker(worker.slot)
            if last is not None and last.incarnation == worker.incarnation:
                if worker.beats != last.beats:  # it makes progress, perhaps in a long step
                    note_progress(job, worker.generation, now)
                # The status matters at once: a worker that has lost a peer may hold the only copy
                # of some state.
                changed |= worker.stepped != last.stepped and bool(job.seen.peers_lost)
            changed |= _take_progress(state, job, node.facts.node, worker, now)
            changed |= _take_pace(job, node.facts.node, worker, now)
            for generation in (*worker.also_entered, worker.generation):
                note_entered(job, worker.incarnation, generation)
        changed |= job.due_report() is not None
    return changed


def _note_starts(seen: NodeSeen, before: NodeStatus, now: float) -> None:
    """Note the start time of processes that are up now and were not in the previous status."""
    for worker in seen.status.workers:
        last = before.worker(worker.slot)
        if last is None or last.incarnation != worker.incarnation:
            seen.started = max(seen.started, (0.0, worker.up_s))
        elif worker.up_s and not last.up_s:
            seen.started = now, worker.up_s


def _without_progress(status: NodeStatus) -> tuple[object, ...]:
    """Return the status without the fields that change with every heartbeat and affect no
    decision."""
    workers = ((w.slot, w.incarnation, w.card, w.generation, w.finished) for w in status.workers)
    node = (status.job_id, status.generation, status.leaving, status.trouble)
    return (*node, status.failed_starts, status.sick, *workers)


def _take_progress(
    state: ClusterState, job: Job, node: NodeName, worker: WorkerStatus, now: float
) -> bool:
    """Note a worker's progress. Return whether statuses alone show that its generation has
    committed its first step: it repeats recorded steps, or its records are late."""
    seen = job.seen
    if job.rollback.restored is not None and worker.generation < job.rollback.restored.generation:
        return False  # progress from before the return to a checkpoint is void
    if worker.finished and seen.processes.finished.get(worker.incarnation) != worker.generation:
        seen.processes.finished[worker.incarnation] = worker.generation
        note_progress(job, worker.generation, now)
    _note_claim(state, job, node, worker, now)
    return (
        job.current.on_the_way
        and worker.generation == job.current.generation
        and (_redoes(job, worker) or seen.steps.furthest_in == job.current.generation)
    )


def _take_pace(job: Job, node: NodeName, status: WorkerStatus, now: float) -> bool:
    """Note the compute time of a process in steps of the newest generation."""
    worker, generation = WorkerId(node, status.slot), job.current.generation
    processes = job.current.processes()
    if status.stepped != generation or processes.get(worker) != status.incarnation:
        return False
    job.seen.pace.enter(generation)
    reading = Reading(status.incarnation, status.compute_steps, status.compute_s)
    return job.seen.pace.take(worker, reading, len(processes), now)


def _redoes(job: Job, worker: WorkerStatus) -> bool:
    """Return whether a worker has repeated a recorded step: the repetition has no record."""
    step, seen = worker.committed_step, job.seen
    if not 0 <= step <= seen.steps.committed_step:
        return False
    first = step
    if seen.steps.redone is not None and seen.steps.redone[0] == worker.generation:
        first = seen.steps.redone[1]
    seen.steps.redone = worker.generation, first, step
    return step > first


def _take_records(job: Job, event: RecordsReceived, now: float) -> None:
    """Take new records, also those whose lines wait for earlier steps."""
    seen = job.seen
    if event.records:
        seen.steps.recorded_step = event.records[-1].step
    newest = seen.steps.committed_step
    ahead = _with_skipped(seen.steps, event.ahead)
    records = [one for one in (*event.records, *ahead) if one.step > newest]
    for record in records:
        seen.steps.committed_step = record.step
        if seen.steps.recent and seen.steps.recent[-1].generation < record.generation:
            seen.steps.last_before = seen.steps.recent[-1]
        if seen.steps.recent and seen.steps.recent[-1].step + 1 < record.step:
            seen.steps.recent.clear()
        seen.steps.recent.append(record)
        _note_step(job, record.step, record.generation, now)
        if record.generation == job.current.generation and job.current.on_the_way:
            # All have entered it: a step is committed by all or by none.
            for process in job.current.processes().values():
                note_entered(job, process, record.generation)
        _note_first_step(job, record.generation, now)
    if records:
        _refute_losses(job, records[-1])
        seen.steps.recorded_at = now
        seen.since_step = SinceStep()


def _note_first_step(job: Job, generation: Generation, now: float) -> None:
    timeline = job.seen.timeline
    if timeline is None or generation < job.current.generation:
        return
    timeline.first_step_at = now if timeline.first_step_at is None else timeline.first_step_at


def _with_skipped(steps: StepsSeen, ahead: tuple[StepRecord, ...]) -> Iterator[StepRecord]:
    """Yield the records with the count of skipped steps, which workers do not send."""
    skipped = steps.recent[-1].skipped_steps if steps.recent else 0
    for record in ahead:
        skipped += record.skipped
        yield msgspec.structs.replace(record, skipped_steps=skipped)


def _refute_losses(job: Job, record: StepRecord) -> None:
    """Drop reports of lost peers that the step refutes: it could not be committed without those
    peers."""
    refuted = [
        worker
        for worker, (_, lost) in job.seen.peers_lost.items()
        if record.step > lost.step and record.generation >= lost.generation
        if worker in job.current.processes()
    ]
    for worker in refuted:
        del job.seen.peers_lost[worker]
    job.seen.untrue.update({worker.node for worker in refuted})


def _note_claim(
    state: ClusterState, job: Job, node: NodeName, worker: WorkerStatus, now: float
) -> None:
    """Note a committed step that a status reports, once a second node reports it too."""
    steps, step, stepped = job.seen.steps, worker.committed_step, worker.stepped
    if step <= steps.furthest_step:
        return
    if _others_can_tell(state, job, node):
        claim = step, stepped
        steps.claimed[node] = max(claim, steps.claimed.get(node, claim))
        claims = (
            claimed for name, claimed in steps.claimed.items() if job.current.has_member(name)
        )
        two = nlargest(2, claims)
        step = two[1][0] if len(two) > 1 else 0
        stepped = min((generation for _, generation in two), default=stepped)
    _note_step(job, step, worker.generation, now)
    if 0 < step == steps.furthest_step:
        steps.furthest_in = max(steps.furthest_in, stepped)
        _note_first_step(job, steps.furthest_in, now)
    steps.claimed = {
        n: claimed for n, claimed in steps.claimed.items() if claimed[0] > steps.furthest_step
    }


def _others_can_tell(state: ClusterState, job: Job, node: NodeName) -> bool:
    """Return whether other nodes may confirm the step, as far as this master knows."""
    others = (name for name in job.current.members if name != node)
    if not job.seen.inherited:
        return any(others)
    known = (worker for name in others for worker in state.nodes[name].seen.status.workers)
    return any(worker.committed_step > 0 for worker in known)


def _note_step(job: Job, step: int, generation: Generation, now: float) -> None:
    if job.rollback.restored is not None and generation < job.rollback.restored.generation:
        return  # that generation's state is void
    if step > job.seen.steps.furthest_step:
        job.seen.steps.furthest_step, job.seen.steps.advanced_at = step, now
        note_progress(job, generation, now)

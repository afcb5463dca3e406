"""How far nodes and jobs get on, as statuses, reports of phases and records tell.

Writes to what is `seen` alone. Must not know what want of progress leads to
(`oobleck.master.rules.stalls`).
"""

from oobleck.host.ipc.messages import PhaseReached, StepRecord
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.job_observed import SinceStep
from oobleck.master.state.node import Node
from oobleck.planner.ids import Generation, Incarnation, WorkerId
from oobleck.proto.types import NodeStatus, WorkerStatus


def take_status(state: ClusterState, node: Node, status: NodeStatus, now: float) -> bool:
    seen = node.seen
    seen.hear(now)
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
                # Who has lost a peer may have what nobody else has any more.
                changed |= worker.stepped != last.stepped and bool(job.seen.peers_lost)
            changed |= _take_progress(job, worker, now)
            _note_entered(job, worker.incarnation, worker.generation)
    return changed


def _without_progress(status: NodeStatus) -> tuple[object, ...]:
    """The status without what changes with every heartbeat and decides nothing by itself."""
    workers = ((w.slot, w.incarnation, w.store, w.generation, w.finished) for w in status.workers)
    node = (status.job_id, status.generation, status.leaving, status.trouble)
    return (*node, status.failed_starts, *workers)


def _take_progress(job: Job, worker: WorkerStatus, now: float) -> bool:
    """Returns whether it shows the first step of a generation that does known steps again."""
    seen = job.seen
    if job.rollback.restored is not None and worker.generation < job.rollback.restored.generation:
        return False  # how far it came before the others went back says nothing any more
    if worker.finished and seen.processes.finished.get(worker.incarnation) != worker.generation:
        seen.processes.finished[worker.incarnation] = worker.generation
        note_progress(job, worker.generation, now)
    _note_step(job, worker.committed_step, worker.generation, now)
    return job.on_the_way and worker.generation == job.generation and _redoes(job, worker)


def _take_beats(job: Job, before: WorkerStatus, worker: WorkerStatus, now: float) -> None:
    """In a step that takes long, its instructions show that it gets on."""
    if worker.beats != before.beats:
        note_progress(job, worker.generation, now)


def _redoes(job: Job, worker: WorkerStatus) -> bool:
    """Records of steps that were recorded before do not come again: statuses must tell of them."""
    step, seen = worker.committed_step, job.seen
    if not 0 <= step <= seen.steps.committed_step:
        return False
    first = step
    if seen.steps.redone is not None and seen.steps.redone[0] == worker.generation:
        first = seen.steps.redone[1]
    seen.steps.redone = worker.generation, first, step
    return step > first


def _note_entered(job: Job, process: Incarnation, generation: Generation) -> None:
    """What the process has entered, by its report or by its node's status: a master that has just
    started did not get the report."""
    before = job.seen.processes.entered.get(process, frozenset())
    # Where a plan is not known any more a step has been committed in a newer one.
    if generation in job.lineage.plans and generation not in before:
        job.seen.processes.entered[process] = before | {generation}


def take_phase(job: Job, worker: WorkerId, reached: PhaseReached, now: float) -> None:
    process = job.processes().get(worker)
    if reached.phase == "transferred" and process is not None:
        _note_entered(job, process, reached.generation)
    timeline = job.seen.timeline
    note_progress(job, reached.generation, now)
    if timeline is None or reached.generation != job.generation:
        return
    match reached.phase:
        case "aborted":
            if job.made is None or worker not in job.made.starting:
                timeline.aborted_at = now  # others have nothing to leave
            timeline.answered.add(worker)
        case "joined":
            timeline.joined_at = now
            timeline.joined.add(worker)
            timeline.committed_step = reached.committed_step
            timeline.redo = timeline.redo or reached.redo
            timeline.rolled_forward = timeline.rolled_forward or reached.rolled_forward
            timeline.salvaged_microbatches = reached.salvaged_microbatches
        case "transferred":
            timeline.transferred_at = now
            timeline.entered.add(worker)
            timeline.received_bytes += reached.received_bytes


def take_records(job: Job, records: tuple[StepRecord, ...], now: float) -> None:
    """`records` follow on those before."""
    seen = job.seen
    for record in records:
        seen.steps.committed_step = record.step
        if seen.steps.recent and seen.steps.recent[-1].generation < record.generation:
            seen.steps.last_before = seen.steps.recent[-1]
        seen.steps.recent.append(record)
        _note_step(job, record.step, record.generation, now)
        timeline = seen.timeline
        if (
            timeline is not None
            and timeline.first_step_at is None
            and record.generation >= job.generation
        ):
            timeline.first_step_at = now
    if records:
        seen.steps.recorded_at = now
        seen.since_step = SinceStep()


def _note_step(job: Job, step: int, generation: Generation, now: float) -> None:
    if job.rollback.restored is not None and generation < job.rollback.restored.generation:
        return  # the state of then counts no more
    if step > job.seen.steps.furthest_step:
        job.seen.steps.furthest_step = step
        note_progress(job, generation, now)


def note_progress(job: Job, generation: Generation, now: float) -> None:
    """What older generations still do is no way forward for a newer one that waits for them."""
    if generation >= job.generation:
        job.seen.progressed_at = now

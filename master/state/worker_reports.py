"""What workers say, by way of their agents: ends, hangs, phases, losses, failures, checkpoints.

Writes to what is `seen` of the job, and that the node was heard. What a process says that another
one has replaced changes nothing. Must not know what is decided by it.
"""

import msgspec

from oobleck.host.ipc.messages import CheckpointSaved, Measured, PeerLost, Restored, SaveFailed
from oobleck.master.events.reports import (
    MeasurementReported,
    PeerLostReported,
    PhaseReported,
    SaveReported,
    WorkerExitReported,
    WorkerFailedReported,
    WorkerHungReported,
    WorkerWord,
)
from oobleck.master.state import evidence, unreachable
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.progress import take_phase


def hear(state: ClusterState, event: WorkerWord, now: float) -> bool:
    """Returns whether anything changed that a decision could depend on."""
    job, counts = state.jobs[event.job_id], True
    match event:
        case WorkerExitReported():
            counts = _hear_exit(state, job, event, now)
        case WorkerHungReported():
            counts = _hear_hang(state, job, event, now)
        case WorkerFailedReported():
            counts = _hear_failure(state, job, event, now)
        case SaveReported():
            return _hear_save(job, event, now)
        case PhaseReported():
            if not _is_stale(job, event):
                take_phase(job, event.worker, event.phase, now)
        case PeerLostReported():
            _hear_peer_lost(state, job, event, now)
        case MeasurementReported():
            _take_measurement(job, event)
    if counts:
        state.nodes[event.worker.node].seen.hear(now)
    return counts


def _hear_exit(state: ClusterState, job: Job, event: WorkerExitReported, now: float) -> bool:
    if event.incarnation in job.seen.exits:
        return False
    if _is_stale(job, event):
        if job.on_the_way:  # it may be what the way is the answer to
            evidence.note(state, event, now)
        return False
    job.seen.exits[event.incarnation] = event.exited
    evidence.note(state, event, now)
    if job.counts_on(event.incarnation):
        job.seen.deaths.setdefault(event.worker, []).append(event.exited)
    elif event.incarnation in job.processes().values():
        job.seen.stillborn.setdefault(event.worker.node, []).append(event.exited)
    return True


def _hear_hang(state: ClusterState, job: Job, event: WorkerHungReported, now: float) -> bool:
    if job.seen.is_gone(event.incarnation) or _is_stale(job, event):
        return False
    job.seen.hung[event.incarnation] = event.hung
    evidence.note(state, event, now)
    return True


def _hear_failure(state: ClusterState, job: Job, event: WorkerFailedReported, now: float) -> bool:
    if _is_stale(job, event):
        return False
    evidence.note(state, event, now)
    counts = job.counts_on(event.incarnation)
    if not counts and not job.goes_back(event.incarnation):
        job.seen.unfit.setdefault(event.worker.node, event.message)
    elif event.kind == "internal":
        job.seen.complaints[event.worker] = event.message
    elif event.kind == "node" or not counts:
        job.seen.ailing.setdefault(event.worker.node, (now, event.message))
    elif job.seen.failure is None:
        job.seen.failure = event.message
    return True


def _hear_save(job: Job, event: SaveReported, now: float) -> bool:
    if _is_stale(job, event):
        return False
    if isinstance(event.what, SaveFailed):
        job.seen.progressed_at = now  # it is tried again and again
    if job.knows(event.what) or event.what in job.seen.save_reports:
        return False
    job.seen.save_reports = (*job.seen.save_reports, event.what)
    return True


def _hear_peer_lost(state: ClusterState, job: Job, event: PeerLostReported, now: float) -> None:
    # Workers may still be in an older generation than a plan for a step boundary.
    in_time = job.abrupt <= event.lost.generation <= job.generation
    if in_time and not _is_stale(job, event):
        at, first = job.seen.peers_lost.setdefault(event.worker, (now, event.lost))
        if first.generation == event.lost.generation:
            job.seen.peers_lost[event.worker] = at, _with_more(first, event.lost)
        unreachable.note(state, job, event.worker, event.lost)
        evidence.note(state, event, now)


def _with_more(first: PeerLost, then: PeerLost) -> PeerLost:
    """A worker's training and its lifeline both tell, and not both of them know whom it misses."""
    return msgspec.structs.replace(
        first,
        unreached=tuple(sorted({*first.unreached, *then.unreached})),
        store_unreached=first.store_unreached or then.store_unreached,
    )


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

"""Application of workers' reports, sent by their agents: exits, hangs, losses, failures, phases,
checkpoints, measurements.

Writes to the job's `seen` part. Reports of replaced processes change nothing. Must not know the
decisions based on them.
"""

import msgspec

from oobleck.core.ids import Generation, Incarnation, NodeName, WorkerId
from oobleck.core.messages import (
    CheckpointSaved,
    Evaluated,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
)
from oobleck.master.events.unions import WorkerReported
from oobleck.master.state import evidence
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import KNOWN_REPORTS, Job
from oobleck.master.state.job_observed import Received, SaveReport
from oobleck.proto.types import Hung, WorkerExited

#: Two nodes (sorted), one of which reported that it does not reach the other.
Pair = tuple[NodeName, NodeName]


def hear(state: ClusterState, event: WorkerReported, now: float) -> bool:
    """Apply a report, and return whether anything changed that a decision could depend on."""
    job, counts = state.jobs[event.job_id], True
    match event.what:
        case WorkerExited() as exited:
            counts = _hear_exit(job, event, exited, now)
        case Hung() as hung:
            counts = _hear_hang(job, event, hung, now)
        case Failed() as failed:
            counts = _hear_failure(job, event, failed, now)
        case CheckpointSaved() | SaveFailed() as save:
            return not _is_stale(job, event) and hear_save(job, save, now)
        case PhaseReached() as reached:
            if not _is_stale(job, event):
                _take_phase(job, event.worker, reached, now)
        case PeerLost() as lost:
            _hear_peer_lost(state, job, event, lost, now)
        case Measured() | LinkMeasured() as measured:
            counts = _take_measurement(job, event, measured)
        case Evaluated() | Restored():
            pass  # are events of their own, once two nodes have reported
    if counts:
        state.nodes[event.worker.node].seen.hear(now)
    return counts


def _hear_exit(job: Job, event: WorkerReported, exited: WorkerExited, now: float) -> bool:
    if event.incarnation in job.seen.processes.exits:
        return False
    if _is_stale(job, event):
        if job.current.on_the_way:  # it may explain the transition under way
            evidence.note(job, event, now)
        return False
    job.seen.processes.exits[event.incarnation] = exited
    evidence.note(job, event, now)
    if job.current.counts_on(event.incarnation):
        job.seen.since_step.deaths.setdefault(event.worker, []).append(exited)
    elif event.incarnation in job.current.processes().values():
        job.seen.faults.stillborn.setdefault(event.worker.node, []).append(exited)
    return True


def _hear_hang(job: Job, event: WorkerReported, hung: Hung, now: float) -> bool:
    if job.seen.is_gone(event.incarnation) or _is_stale(job, event):
        return False
    job.seen.processes.hung[event.incarnation] = hung
    evidence.note(job, event, now)
    return True


def _hear_failure(job: Job, event: WorkerReported, failed: Failed, now: float) -> bool:
    if _is_stale(job, event):
        return False
    evidence.note(job, event, now)
    counts = job.current.counts_on(event.incarnation)
    if not counts and not job.current.goes_back(event.incarnation):
        job.seen.faults.unfit.setdefault(event.worker.node, failed.message)
    elif failed.kind == "internal":
        job.seen.since_step.complaints[event.worker] = failed.message
    elif failed.kind == "node" or not counts:
        job.seen.faults.ailing.setdefault(event.worker.node, (now, failed.message))
    else:
        job.seen.faults.accused[event.worker.node] = now, failed.message
    return True


def hear_save(job: Job, what: SaveReport, now: float) -> bool:
    """Note a report on checkpoints, and return whether it is new."""
    if isinstance(what, SaveFailed):
        job.seen.progressed_at = now  # retries of the output are progress
    if job.knows(what) or what in job.seen.save_reports:
        return False
    job.seen.save_reports = (*job.seen.save_reports, what)[-KNOWN_REPORTS:]
    return True


def _hear_peer_lost(
    state: ClusterState, job: Job, event: WorkerReported, lost: PeerLost, now: float
) -> None:
    # Workers may still be in an older generation than a plan for a step boundary.
    in_time = job.current.abrupt <= lost.generation <= job.current.generation
    if in_time and not _is_stale(job, event):
        at, first = job.seen.peers_lost.setdefault(event.worker, (now, lost))
        if first.generation == lost.generation:
            job.seen.peers_lost[event.worker] = at, _with_more(first, lost)
        _note_no_way(state, job, event.worker, lost)
        evidence.note(job, event, now)


def _with_more(first: PeerLost, then: PeerLost) -> PeerLost:
    """Merge two reports of a worker, by its training and by its links, which know of different
    peers."""
    return msgspec.structs.replace(
        first,
        unreached=tuple(sorted({*first.unreached, *then.unreached})),
        host_unreached=first.host_unreached or then.host_unreached,
    )


def _take_measurement(
    job: Job, event: WorkerReported, measurement: Measured | LinkMeasured
) -> bool:
    """Take a measurement of the newest attempt, and return whether it counts."""
    if isinstance(measurement, Measured) and measurement.alone_s is not None:
        slow, pace = job.slow.get(event.worker), job.seen.pace
        if slow is None or slow.incarnation != event.incarnation:
            return False
        return pace.take_alone(
            event.worker, event.incarnation, measurement.attempt, measurement.alone_s
        )
    measuring = job.profiling.under_way
    if measuring is None or measurement.attempt != measuring.wish.attempt:
        return False
    if (event.worker, event.incarnation) not in measuring.workers:
        return False
    if isinstance(measurement, Measured):
        job.seen.profiling.measured[event.incarnation] = measurement
    else:
        job.seen.profiling.links_measured[measurement.scope] = measurement
    return True


def _is_stale(job: Job, event: WorkerReported) -> bool:
    """Return whether the report is from a replaced process, and so changes nothing; a newer
    checkpoint, or the first answer to a request for one, still counts."""
    if not job.is_replaced(event.worker, event.incarnation):
        return False
    if isinstance(event.what, CheckpointSaved | SaveFailed):
        due = event.what.request > job.saves.answered
        newest = 0 if job.saves.checkpoint is None else job.saves.checkpoint.step
        newer = isinstance(event.what, CheckpointSaved) and event.what.step > newest
        return not (due or newer)
    return True


def _note_no_way(state: ClusterState, job: Job, worker: WorkerId, lost: PeerLost) -> None:
    """Note the nodes that `worker` reports as unreachable, if any."""
    if lost.generation != job.current.generation or not (lost.host_unreached or lost.unreached):
        return
    if (host := rendezvous_host(state, job)) is None:
        return
    others = {peer.node for peer in lost.unreached} | ({host} if lost.host_unreached else set())
    pairs = {ordered(worker.node, other) for other in others - {worker.node}}
    if pairs:
        job.seen.since_step.no_way.setdefault(host, set()).update(pairs)


def ordered(a: NodeName, b: NodeName) -> Pair:
    return (min(a, b), max(a, b))


def rendezvous_host(state: ClusterState, job: Job) -> NodeName | None:
    """Return the node that hosts the newest generation's rendezvous; None: it is unknown."""
    if job.current.made is None:
        return None
    card = job.current.made.rendezvous.host
    for name in job.current.members:
        node = state.nodes.get(name)  # a node of an ended job may be forgotten
        if node and any(worker.card == card for worker in node.seen.status.workers):
            return name
    return None


def note_entered(job: Job, process: Incarnation, generation: Generation) -> None:
    """Note that the process has entered the generation, by its report or its node's status."""
    before = job.seen.processes.entered.get(process, frozenset())
    # A plan that is not kept is outdated by a step of a newer one.
    if generation in job.lineage.plans and generation not in before:
        job.seen.processes.entered[process] = before | {generation}


def _note_received(job: Job, process: Incarnation, reached: PhaseReached) -> None:
    before = job.seen.processes.received.get(process)
    # A plan that is not kept is outdated by a step of a newer one.
    if reached.generation in job.lineage.plans and (
        before is None or before.generation <= reached.generation
    ):
        received = Received(reached.generation, frozenset(reached.layers))
        job.seen.processes.received[process] = received


def _take_phase(job: Job, worker: WorkerId, reached: PhaseReached, now: float) -> None:
    process = job.current.processes().get(worker)
    now -= reached.seconds_ago
    if reached.phase == "transferred" and process is not None:
        note_entered(job, process, reached.generation)
    if reached.phase == "received" and process is not None:
        _note_received(job, process, reached)
    timeline = job.seen.timeline
    note_progress(job, reached.generation, now)
    if timeline is None or reached.generation != job.current.generation:
        return
    match reached.phase:
        case "aborted":
            if job.current.made is None or worker not in job.current.made.starting:
                # Processes that were starting have no generation to leave.
                timeline.aborted_at = max(now, timeline.aborted_at or now)
            timeline.answered.add(worker)
        case "received":
            pass  # noted above, even if it is of an older plan
        case "joined":
            timeline.joined_at = max(now, timeline.joined_at or now)
            timeline.joined[worker] = reached.committed_step or 0
            timeline.committed_step = reached.committed_step
            timeline.redo = timeline.redo or reached.redo
            timeline.rolled_forward = timeline.rolled_forward or reached.rolled_forward
            timeline.salvaged_microbatches = reached.salvaged_microbatches
        case "transferred":
            timeline.transferred_at = max(now, timeline.transferred_at or now)
            timeline.entered.add(worker)
            timeline.received_bytes += reached.received_bytes
            timeline.fed_bytes += reached.fed_bytes


def note_progress(job: Job, generation: Generation, now: float) -> None:
    """Note progress of the job, unless it is of an older generation."""
    if generation >= job.current.generation:
        # Never back: a report may have waited for a session.
        job.seen.progressed_at = max(now, job.seen.progressed_at or now)

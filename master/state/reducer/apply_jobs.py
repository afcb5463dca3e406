"""Application of events of jobs: requests, turns, measuring, checkpoints, and the end.

Their plans are `oobleck.master.state.reducer.apply_plans`'s, and what they lose
`oobleck.master.state.reducer.apply_nodes`'s.
"""

from oobleck.core.ids import JobId
from oobleck.master.events.jobs import (
    CheckpointPublished,
    CheckpointRequested,
    JobAdopted,
    JobCancelled,
    JobCancelRequested,
    JobCaughtUp,
    JobEvent,
    JobFailed,
    JobForgotten,
    JobPutBack,
    JobRestored,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    JobWaiting,
    MeasuringStarted,
    ProfileChosen,
    RateChanged,
    RecordsDiffer,
    RecordsLost,
    SaveProblem,
)
from oobleck.master.events.nodes import NodeYielded
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import (
    KNOWN_LOST,
    KNOWN_REPORTS,
    KNOWN_REQUESTS,
    NO_GENERATION,
    Job,
)
from oobleck.master.state.job_observed import JobSeen, ProfilingSeen
from oobleck.master.state.job_states import move
from oobleck.master.state.node import Node
from oobleck.master.state.rates import slow_after


def apply(state: ClusterState, event: JobEvent, now: float, unix: float) -> None:
    match event:
        case JobSubmitted():
            state.jobs[event.job_id] = _submitted(event, unix, state.sequence)
            state.requests[event.request_id] = event.job_id
            state.submissions += 1
        case JobAdopted():
            _adopt(state, event, now, unix)
        case JobCancelRequested():
            state.jobs[event.job_id].cancel_requested = True
        case CheckpointRequested():
            _ask_for_checkpoint(state.jobs[event.job_id], event)
        case CheckpointPublished() | SaveProblem() | JobRestored():
            _note_save(state.jobs[event.job_id], event, now, unix)
        case JobCaughtUp():
            state.jobs[event.job_id].rollback.redo_until = 0
        case RateChanged():
            _note_rate(state, state.jobs[event.job_id], event, now, unix)
        case RecordsDiffer():
            pass  # for the operator, who may drain one of them
        case RecordsLost():
            lost = state.jobs[event.job_id].lost
            lost.steps += len(event.steps)
            lost.last = (*lost.last, event)[-KNOWN_LOST:]
        case JobStarted() | JobPutBack() | JobWaiting():
            _take_turn(state, state.jobs[event.job_id], event, now, unix)
        case MeasuringStarted() | ProfileChosen():
            _measure(state.jobs[event.job_id], event, now)
        case JobSucceeded() | JobFailed() | JobCancelled():
            _end(state, state.jobs[event.job_id], event, unix)
        case JobForgotten():
            del state.requests[state.jobs.pop(event.job_id).request_id]


def _note_rate(state: ClusterState, job: Job, event: RateChanged, now: float, unix: float) -> None:
    last, told = job.stand_bys.get(event.worker), job.slow.get(event.worker)
    if last is not None and last.process != event.incarnation:
        del job.stand_bys[event.worker]
    elif last is not None and told is not None and event.rate > told.rate:
        job.set_stand_bys({**job.stand_bys, event.worker: last.better(unix)}, now, unix)
    job.slow = slow_after(state, job, event)


def _adopt(state: ClusterState, event: JobAdopted, now: float, unix: float) -> None:
    """The job has been trained, so what is observed of it counts as after a restart."""
    state.jobs[event.job_id] = Job(
        id=event.job_id,
        request_id=event.request_id,
        spec=event.spec,
        submitted_at=unix,
        submitted_in=state.sequence,
        adopted_in=event.generation,
        seen=JobSeen(since=now, since_unix=unix, inherited=True),
    )
    state.requests[event.request_id] = event.job_id
    state.submissions += 1
    for name in event.nodes:
        state.nodes[name].held = None


def _submitted(event: JobSubmitted, unix: float, sequence: int) -> Job:
    job = Job(
        id=event.job_id,
        request_id=event.request_id,
        spec=event.spec,
        submitted_at=unix,
        submitted_in=sequence,
        profile_only=event.profile_only,
    )
    if event.profile is not None:
        job.profiling.chosen = ProfileChosen(
            job_id=job.id,
            source="file",
            profile=event.profile,
            key="",
            reason=event.spec.profile,
        )
    return job


def _ask_for_checkpoint(job: Job, event: CheckpointRequested) -> None:
    job.saves.requested = event.number
    job.saves.numbers[event.request_id] = event.number
    while len(job.saves.numbers) > KNOWN_REQUESTS:
        del job.saves.numbers[next(iter(job.saves.numbers))]


def _note_save(
    job: Job, event: CheckpointPublished | SaveProblem | JobRestored, now: float, unix: float
) -> None:
    match event:
        case CheckpointPublished():
            # One that was saved before may be told of later, by an agent that was away.
            if _is_newest(job, event.saved.step):
                job.saves.checkpoint, job.saves.failure = event.saved, ""
                job.saves.checkpoint_at = unix
            job.saves.known = (*job.saves.known, event.saved)[-KNOWN_REPORTS:]
            job.saves.answered = max(job.saves.answered, event.saved.request)
        case SaveProblem():
            job.saves.failure = event.failed.reason
            job.saves.known = (*job.saves.known, event.failed)[-KNOWN_REPORTS:]
            job.saves.answered = max(job.saves.answered, event.failed.request)
        case JobRestored():
            job.rollback.restored = event.restored
            step = event.restored.step
            if event.resumed:
                job.rollback.resumed_step = step
                job.seen.steps.committed_step = max(job.seen.steps.committed_step, step)
            elif event.lost_steps:
                job.rollback.redo_until = max(job.rollback.redo_until, step + event.lost_steps)
            job.seen.steps.furthest_step, job.seen.steps.furthest_in = step, NO_GENERATION
            job.seen.steps.claimed.clear()
            job.seen.progressed_at = now
    job.seen.save_reports = tuple(r for r in job.seen.save_reports if not job.knows(r))


def _is_newest(job: Job, step: int) -> bool:
    """Return whether a checkpoint after `step` replaces the newest one. That is also so where the
    job has gone back to a step before the newest one's."""
    newest, restored = job.saves.checkpoint, job.rollback.restored
    if newest is None or step >= newest.step:
        return True
    return restored is not None and restored.step < newest.step


def _take_turn(
    state: ClusterState,
    job: Job,
    event: JobStarted | JobPutBack | JobWaiting,
    now: float,
    unix: float,
) -> None:
    before, why = job.state, job.reason
    move(job, event)
    match event:
        case JobStarted():
            state.active = job.id
            _release(state, job.id)
            if job.current.made is None:
                job.waiting_since = 0.0
        case JobPutBack():
            state.active, job.passed_over = None, True
            job.profiling.under_way = None
            job.reason = f"{why}; {event.instead} has its turn meanwhile"
            if (made := job.current.made) is None:
                job.waiting_since = 0.0
            else:
                nodes = {worker.node for worker in (*made.plan.workers, *made.leaving)}
                yielded = (NodeYielded(job_id=job.id, node=name) for name in sorted(nodes))
                job.current.losses = tuple(yielded)
        case JobWaiting():
            job.profiling.under_way = None
            job.waiting_since = job.waiting_since or unix
            if before != "waiting for nodes":
                job.seen.waiting_since = now
            job.reason = "; ".join(event.causes)


def _release(state: ClusterState, job_id: JobId) -> list[Node]:
    """Hold no more, and return, the nodes that train a job which waited in the queue."""
    nodes = [node for node in state.held.get(job_id, []) if node.held and node.held.queued]
    for node in nodes:
        node.held = None
    return nodes


def _measure(job: Job, event: MeasuringStarted | ProfileChosen, now: float) -> None:
    move(job, event)
    match event:
        case MeasuringStarted():
            job.profiling.under_way, job.profiling.attempts = event, event.wish.attempt
            job.seen.profiling = ProfilingSeen(measuring_since=now)
        case ProfileChosen():
            job.profiling.chosen, job.profiling.under_way = event, None
            job.seen.profiling.measuring_since = None


def _forget_what_led_there(job: Job) -> None:
    """Only the last plan and what came of the job is asked for later; of a thousand nodes all else
    would take more than a megabyte for each job that is known."""
    job.lineage.before, job.lineage.plans = None, {}
    job.current.base = job.current.trained_base = None
    seen = job.seen
    seen.timeline = None
    seen.processes.entered.clear()
    seen.processes.received.clear()
    seen.processes.finished.clear()
    seen.profiling.measured.clear()
    seen.peers_lost.clear()


def _end(
    state: ClusterState, job: Job, event: JobSucceeded | JobFailed | JobCancelled, unix: float
) -> None:
    move(job, event)
    job.reason = event.reason if isinstance(event, JobFailed) else ""
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

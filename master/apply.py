"""How each event changes the state: the only place that writes to a `ClusterState`.

A job goes through these states:

    queued --JobStarted--> starting --FirstStepCommitted--> running
    running --a loss or PlanMade--> reconfiguring --FirstStepCommitted--> running
    starting, reconfiguring --JobWaiting--> waiting for nodes
    waiting for nodes --JobPutBack (no plan yet)--> queued
    waiting for nodes --JobStarted (no plan yet)--> starting, --PlanMade--> reconfiguring
    any of them --JobSucceeded, JobFailed, JobCancelled--> succeeded, failed, cancelled

A `starting` job is `profiling` from MeasuringStarted to ProfileChosen, and may go from there to
waiting, failed and cancelled too. It stays `starting` until a step of its first plans is committed,
and `reconfiguring` until one of the newest plan is. The record of that step may come late: when a
loss has been declared already, the job does not become `running` by it. Losses count only where
they hit the newest plan. An event that the table does not allow is a broken invariant of ours.
"""

from collections.abc import Mapping
from dataclasses import replace

from oobleck.master import cordon, sightings
from oobleck.master.events import Event, JournalCut, Journaled, MasterStarted
from oobleck.master.incident import LastIncident
from oobleck.master.incidentrecord import summary_of
from oobleck.master.investigate import closes, incident_after
from oobleck.master.job import ENDED, KNOWN_PROCESSES, KNOWN_REQUESTS, Job, JobState
from oobleck.master.jobevents import (
    CheckpointPublished,
    CheckpointRequested,
    JobCancelled,
    JobCancelRequested,
    JobFailed,
    JobPutBack,
    JobRestored,
    JobStarted,
    JobSubmitted,
    JobSucceeded,
    JobWaiting,
    MeasuringStarted,
    ProfileChosen,
    SaveProblem,
)
from oobleck.master.jobseen import JobSeen, Way
from oobleck.master.node import Node, NodeSeen
from oobleck.master.nodeevents import (
    NodeCleared,
    NodeDrained,
    NodeDrainRequested,
    NodeKept,
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeReleased,
    NodeReset,
    NodeUndrained,
    WorkerLost,
)
from oobleck.master.observations import Observed
from oobleck.master.observe import observe
from oobleck.master.planevents import FirstStepCommitted, PlanFound, PlanMade
from oobleck.master.state import ClusterState
from oobleck.master.trust import fold as fold_trust
from oobleck.master.trustevents import TrustChanged

TRANSITIONS: Mapping[tuple[JobState, type[Journaled]], JobState] = {
    ("queued", JobStarted): "starting",
    ("starting", MeasuringStarted): "profiling",
    ("starting", ProfileChosen): "starting",
    ("profiling", MeasuringStarted): "profiling",
    ("profiling", ProfileChosen): "starting",
    ("profiling", JobWaiting): "waiting for nodes",
    ("profiling", JobFailed): "failed",
    ("profiling", JobCancelled): "cancelled",
    ("starting", PlanMade): "starting",
    ("starting", NodeLost): "starting",
    ("starting", WorkerLost): "starting",
    ("starting", NodeReset): "starting",
    ("starting", NodeLeftOut): "starting",
    ("starting", FirstStepCommitted): "running",
    ("starting", JobWaiting): "waiting for nodes",
    ("running", NodeLost): "reconfiguring",
    ("running", WorkerLost): "reconfiguring",
    ("running", PlanMade): "reconfiguring",
    ("running", NodeLeftOut): "reconfiguring",
    ("running", NodeReset): "reconfiguring",
    ("reconfiguring", NodeReset): "reconfiguring",
    ("reconfiguring", NodeLeftOut): "reconfiguring",
    ("running", NodeDrained): "reconfiguring",
    ("reconfiguring", NodeDrained): "reconfiguring",
    ("waiting for nodes", NodeDrained): "waiting for nodes",
    ("starting", NodeDrained): "starting",
    ("waiting for nodes", NodeLeftOut): "waiting for nodes",
    ("reconfiguring", NodeLost): "reconfiguring",
    ("reconfiguring", WorkerLost): "reconfiguring",
    ("reconfiguring", PlanMade): "reconfiguring",
    ("reconfiguring", FirstStepCommitted): "running",
    ("reconfiguring", JobWaiting): "waiting for nodes",
    ("waiting for nodes", JobStarted): "starting",
    ("waiting for nodes", JobPutBack): "queued",
    ("waiting for nodes", PlanMade): "reconfiguring",
    ("waiting for nodes", FirstStepCommitted): "waiting for nodes",
    ("waiting for nodes", NodeLost): "waiting for nodes",
    ("waiting for nodes", WorkerLost): "waiting for nodes",
    ("waiting for nodes", JobWaiting): "waiting for nodes",
    ("starting", JobSucceeded): "succeeded",
    ("running", JobSucceeded): "succeeded",
    ("reconfiguring", JobSucceeded): "succeeded",
    ("waiting for nodes", JobSucceeded): "succeeded",
    ("starting", JobFailed): "failed",
    ("running", JobFailed): "failed",
    ("reconfiguring", JobFailed): "failed",
    ("waiting for nodes", JobFailed): "failed",
    ("queued", JobCancelled): "cancelled",
    ("starting", JobCancelled): "cancelled",
    ("running", JobCancelled): "cancelled",
    ("reconfiguring", JobCancelled): "cancelled",
    ("waiting for nodes", JobCancelled): "cancelled",
}


class InvalidTransition(Exception):
    """An event came to a job in a state that does not allow it."""

    def __init__(self, job: Job, event: Journaled) -> None:
        super().__init__(
            f"job {job.id} is {job.state} and got {type(event).__name__}; "
            f"before: {', '.join(job.history) or 'nothing'}"
        )


def apply(state: ClusterState, event: Event, *, now: float, unix: float) -> bool:
    """Change `state` by `event`, which came at `now` (this process's clock) and `unix` (the
    calendar's). Returns whether anything changed that a decision could depend on."""
    if isinstance(event, Observed):
        return observe(state, event, now)
    state.sequence += 1
    _follow_incident(state, event, unix)
    _fold(state, event, now, unix)
    _set_desired(state, now, unix)
    return True


def _follow_incident(state: ClusterState, event: Journaled, unix: float) -> None:
    found = incident_after(state, event, unix)
    if found is None:
        return
    job, incident = found
    if incident.number > job.incidents:
        job.incidents = incident.number
    if isinstance(event, PlanMade | FirstStepCommitted):
        job.seen.sightings.clear()  # the event carries them
    if closes(job, event):
        summary = summary_of(incident, event, unix)
        job.last_incident = LastIncident(number=incident.number, at=unix, summary=summary)
        job.seen.sightings.clear()
    job.incident = None if closes(job, event) else incident


def _fold(state: ClusterState, event: Journaled, now: float, unix: float) -> None:
    match event:
        case MasterStarted():
            for node in state.nodes.values():
                node.seen = NodeSeen(last_heard=now, awaited=True)
                cordon.restarted(node, now, unix)
            for job in state.jobs.values():
                job.seen = JobSeen(since=now, committed_step=job.resumed_step)
                if job.measuring is not None:
                    job.seen.measuring_since = now
                if job.losses:
                    _note_loss(job, 0.0, now)
                if job.made is not None:
                    job.seen.progressed_at = now
        case JournalCut():
            # The events that are gone may have been acted on, with newer versions than are known.
            for node in state.nodes.values():
                node.desired = replace(node.desired, version=_next_version(node, unix))
            for job in state.jobs.values():
                if job.state not in ENDED:
                    job.journal_cut_at = unix
        case NodeRegistered():
            _register(state, event, now)
        case NodeCleared():
            state.nodes[event.node].stale_workers = False
        case NodeLost():
            _lose_node(state, event, now, unix)
        case JobSubmitted():
            state.jobs[event.job_id] = _job(event, unix)
            state.requests[event.request_id] = event.job_id
        case JobCancelRequested():
            state.jobs[event.job_id].cancel_requested = True
        case NodeLeftOut():
            _leave_out(state.jobs[event.job_id], event, now)
        case CheckpointRequested():
            _ask_for_checkpoint(state.jobs[event.job_id], event)
        case CheckpointPublished() | SaveProblem() | JobRestored():
            _note_save(state.jobs[event.job_id], event, now)
        case (
            NodeDrainRequested() | NodeKept() | NodeUndrained() | NodeQuarantined() | NodeReleased()
        ):
            cordon.fold(state, event, now, unix)
        case PlanFound():
            state.jobs[event.job_id].plans[event.plan.generation] = event.plan
        case NodeDrained():
            _drained(state, event, now, unix)
        case NodeReset():
            _reset(state.nodes[event.node], state.jobs[event.job_id], event, now)
        case _ if isinstance(event, TrustChanged):
            fold_trust(state.trust, event, unix)
        case _:
            _fold_job(state, state.jobs[event.job_id], event, now, unix)


def _job(event: JobSubmitted, unix: float) -> Job:
    job = Job(
        id=event.job_id,
        request_id=event.request_id,
        spec=event.spec,
        submitted_at=unix,
        profile_only=event.profile_only,
    )
    if event.profile is not None:
        job.profile = ProfileChosen(
            job_id=job.id,
            source="file",
            profile=event.profile,
            key="",
            reason=event.spec.profile,
        )
    return job


def _register(state: ClusterState, event: NodeRegistered, now: float) -> None:
    name = event.facts.node
    node = Node(facts=event.facts, stale_workers=event.stale_workers, seen=NodeSeen(last_heard=now))
    known = state.nodes.get(name)
    if state.job is not None:
        cordon.forgive(state.job, name)
    if known is not None:
        node.desired = known.desired
        node.drain = cordon.kept_by(known, event.facts)
        node.failures = known.failures
        node.seen.release_at = known.seen.release_at
        if known.facts.incarnation == event.facts.incarnation and state.job is not None:
            _take_back_loss(state.job, event)
    state.nodes[name] = node


def _take_back_loss(job: Job, event: NodeRegistered) -> None:
    """The same agent is back before any plan was made without it."""
    job.losses = tuple(
        loss
        for loss in job.losses
        if not (isinstance(loss, NodeLost) and loss.node == event.facts.node)
    )
    if not job.losses:
        job.seen.evidence_at = job.seen.declared_at = None


def _lose_node(state: ClusterState, event: NodeLost, now: float, unix: float) -> None:
    node = state.nodes[event.node]
    if event.cause != "left":
        cordon.note_failure(node, event.reason, unix)
    node.registered = False
    node.reason = event.reason
    node.stale_workers = False
    node.seen.session = None
    job = state.job
    if job is not None and event.node in (*job.members, *job.leaving):
        _move(job, event)
        job.losses = (*job.losses, event)
        _note_loss(job, event.detect_s, now)


def _drained(state: ClusterState, event: NodeDrained, now: float, unix: float) -> None:
    cordon.fold(state, event, now, unix)
    if event.job_id is not None:
        job = state.jobs[event.job_id]
        _move(job, event)
        job.losses = (*job.losses, event)
        _note_loss(job, 0.0, now)


def _ask_for_checkpoint(job: Job, event: CheckpointRequested) -> None:
    job.save_request = event.number
    job.save_numbers[event.request_id] = event.number
    while len(job.save_numbers) > KNOWN_REQUESTS:
        del job.save_numbers[next(iter(job.save_numbers))]


def _leave_out(job: Job, event: NodeLeftOut, now: float) -> None:
    if event.node in job.members:
        _move(job, event)
        job.losses = (*job.losses, event)
        _note_loss(job, 0.0, now)
    else:
        sightings.forget_node(job, event.node)
    job.left_out[event.node] = event.reason
    if event.node in job.seen.stillborn and job.trained and event.node in job.trained.plan.nodes:
        job.seen.given_up[event.node] = event.reason
    job.seen.unfit.pop(event.node, None)
    job.seen.stillborn.pop(event.node, None)


def _reset(node: Node, job: Job, event: NodeReset, now: float) -> None:
    """Give its work to the others, and it comes back as any node that was given up does."""
    _move(job, event)
    job.losses = (*job.losses, event)
    _note_loss(job, 0.0, now)
    job.seen.stalls += 1
    node.stale_workers = True


def _note_save(
    job: Job, event: CheckpointPublished | SaveProblem | JobRestored, now: float
) -> None:
    match event:
        case CheckpointPublished():
            # One that was saved before may be told of later, by an agent that was away.
            if _is_newest(job, event.saved.step):
                job.checkpoint, job.save_failure = event.saved, ""
            job.known_reports.append(event.saved)
            job.save_answered = max(job.save_answered, event.saved.request)
        case SaveProblem():
            job.save_failure = event.failed.reason
            job.known_reports.append(event.failed)
            job.save_answered = max(job.save_answered, event.failed.request)
        case JobRestored():
            job.restored = event.restored
            step = event.restored.step
            if event.resumed:
                job.resumed_step = step
                job.seen.committed_step = max(job.seen.committed_step, step)
            job.seen.furthest_step = step
            job.seen.progressed_at = now
    job.seen.save_reports = tuple(r for r in job.seen.save_reports if not job.knows(r))


def _is_newest(job: Job, step: int) -> bool:
    """Whether a checkpoint after `step` takes the place of the newest one, which does not count
    where the job has gone back behind it."""
    newest, restored = job.checkpoint, job.restored
    if newest is None or step >= newest.step:
        return True
    return restored is not None and restored.step < newest.step


def _note_loss(job: Job, detect_s: float, now: float) -> None:
    first = now - detect_s
    seen = job.seen
    seen.evidence_at = first if seen.evidence_at is None else min(seen.evidence_at, first)
    seen.declared_at = now


def _move(job: Job, event: Journaled) -> None:
    to = TRANSITIONS.get((job.state, type(event)))
    if to is None:
        raise InvalidTransition(job, event)
    if to == "running" and job.losses:
        to = "reconfiguring"
    job.history.append(f"{job.state} --{type(event).__name__}--> {to}")
    if to != job.state:
        job.state, job.reason = to, ""


def _fold_job(
    state: ClusterState,
    job: Job,
    event: WorkerLost
    | JobStarted
    | MeasuringStarted
    | ProfileChosen
    | JobWaiting
    | JobPutBack
    | PlanMade
    | FirstStepCommitted
    | JobSucceeded
    | JobFailed
    | JobCancelled,
    now: float,
    unix: float,
) -> None:
    why = job.reason
    _move(job, event)
    match event:
        case JobPutBack():
            state.active, job.passed_over = None, True
            job.reason = f"{why}; {event.instead} has its turn meanwhile"
        case JobStarted():
            state.active = job.id
        case MeasuringStarted():
            job.measuring, job.attempts = event, event.wish.attempt
            job.seen.measuring_since = now
            job.seen.measured.clear()
            job.seen.links_measured.clear()
        case ProfileChosen():
            job.profile, job.measuring = event, None
            job.seen.measuring_since = None
        case JobWaiting():
            job.measuring = None
            job.reason = "; ".join(event.causes)
        case WorkerLost():
            what = f"{event.worker}: {event.reason}"
            cordon.note_failure(state.nodes[event.worker.node], what, unix)
            job.losses = (*job.losses, event)
            _note_loss(job, event.detect_s, now)
        case PlanMade():
            _make_plan(job, event, now, unix)
        case FirstStepCommitted():
            job.stepped, job.trained = event.generation, job.made
            for node in job.members:
                job.seen.stillborn.pop(node, None)
            job.plans = {g: plan for g, plan in job.plans.items() if g >= event.generation}
            if job.state == "running":
                job.reason = ""
            job.seen.way = None
            _forget_processes(state, job)
            if job.started_at == 0.0:
                job.started_at = unix
        case JobSucceeded() | JobFailed() | JobCancelled():
            job.reason = event.reason if isinstance(event, JobFailed) else ""
            job.finished_at = unix
            job.measuring = None
            job.losses = ()
            job.seen.way = None
            if state.active == job.id:
                state.active = None
            for other in state.jobs.values():
                other.passed_over = False


def _forget_processes(state: ClusterState, job: Job) -> None:
    """Of processes that neither the plan nor any agent knows, nothing is asked any more."""
    known = set(job.processes().values())
    known |= {w.incarnation for node in state.nodes.values() for w in node.seen.status.workers}
    seen = job.seen
    seen.exits = {process: end for process, end in seen.exits.items() if process in known}
    seen.hung = {process: word for process, word in seen.hung.items() if process in known}
    seen.entered = {process: at for process, at in seen.entered.items() if process in known}
    seen.finished = {process: at for process, at in seen.finished.items() if process in known}


def _note_replaced(job: Job, event: PlanMade) -> None:
    """`event` is the plan that follows `job.made`."""
    before = job.made.incarnations if job.made is not None else ()
    job.replaced |= dict.fromkeys(before)
    for process in event.incarnations:
        job.replaced.pop(process, None)
    while len(job.replaced) > KNOWN_PROCESSES:
        del job.replaced[next(iter(job.replaced))]


def _make_plan(job: Job, event: PlanMade, now: float, unix: float) -> None:
    seen = job.seen
    declared_at = now if seen.declared_at is None else seen.declared_at
    evidence_at = now - event.detect_s if seen.evidence_at is None else seen.evidence_at
    seen.way = None  # of one that is adopted, others have seen the way
    if event.rule != "adopt":
        seen.way = Way(evidence_at=evidence_at, declared_at=declared_at, pushed_at=now)
    seen.evidence_at = seen.declared_at = None
    if job.made is not None:
        job.before = job.made.plan
        job.reconfigurations += 1
    if not event.boundary:
        job.abrupt = event.plan.generation
        seen.peers_lost.clear()
    if event.cause in ("worker lost", "peers lost", "no progress"):
        seen.regroups += 1
        if seen.fruitless_since is None:
            seen.fruitless_since = now
    if event.cause == "no progress" and event.rule == "regroup":
        seen.stalls += 1
    seen.progressed_at = now
    _note_replaced(job, event)
    job.made, job.made_at = event, unix
    job.reason = event.reason
    job.losses = ()
    job.most_nodes = max(job.most_nodes, len(event.plan.nodes))
    job.plans[event.plan.generation] = event.plan


def _set_desired(state: ClusterState, now: float, unix: float) -> None:
    """Bring every node's desired state in line with its job; a change gets a new version.

    Versions follow the calendar, so that they grow even where a journal was lost.
    """
    job = state.job
    chosen = {node.facts.node for node in state.candidates(job)} if job else set()
    members = {*job.members, *job.leaving} if job else set()
    chosen |= {name for name in members if cordon.moves_off(state.nodes[name])}
    for name, node in state.nodes.items():
        job_id = job.id if job and name in chosen else None
        generation = job.generation if job and job_id and name in members else None
        attempt = 0
        if job and job_id and generation is None and job.measuring is not None:
            attempt = job.measuring.wish.attempt
        waits = job is not None and job.save_answered < job.save_request
        save = job.save_request if job and waits and generation is not None else 0
        desired = replace(
            node.desired,
            job_id=job_id,
            generation=generation,
            attempt=attempt,
            save=save,
            drained=node.drain is not None and node.drain.done,
        )
        if desired != node.desired:
            if desired.job_id != node.desired.job_id:
                node.seen.ready_at = None
            node.desired = replace(desired, version=_next_version(node, unix))
        if job_id is None:
            node.seen.assigned_at = None
        elif node.seen.assigned_at is None:
            node.seen.assigned_at = now


def _next_version(node: Node, unix: float) -> int:
    return max(node.desired.version + 1, int(unix * 1000))

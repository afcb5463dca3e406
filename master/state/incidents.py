"""Follows an incident from its first loss to the step, or the end, that closes it.

It follows from journaled events alone, so a restarted master knows as much. It looks at the state
that an event finds, before the event has changed it. Must not know how a record of an incident
looks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import msgspec

from oobleck.master.events.jobs import (
    JobCancelled,
    JobCaughtUp,
    JobFailed,
    JobRestored,
    JobSucceeded,
)
from oobleck.master.events.nodes import (
    Evidence,
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeRegistered,
    NodeReset,
    WorkerLost,
)
from oobleck.master.events.plans import FirstStepCommitted, PlanMade, Transition
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import describe_exit
from oobleck.master.state.incident import (
    MOST_EVIDENCE,
    Attempt,
    DatedEvidence,
    Incident,
    Kind,
    Setback,
)
from oobleck.master.state.job import Job
from oobleck.planner.ids import WorkerId
from oobleck.proto.types import WorkerExited

replace = msgspec.structs.replace

#: So long training goes on after the first evidence for it to count.
_ON_S = 1.0


def incident_after(
    state: ClusterState, event: Journaled, unix: float
) -> tuple[Job, Incident] | None:
    """The job that `event` is about and its incident with what the event adds; None: it adds
    nothing. Whether the event closes the incident, `closes` says."""
    incident: Incident | None
    match event:
        case NodeLost():
            if (active := state.job) is None or not active.has_member(event.node):
                return None
            job = active
            incident = _with_setback(job, _node_lost(job, event, unix))
            incident = _with_evidence(incident, event.evidence, unix)
        case NodeRegistered():
            if (active := state.job) is None or active.incident is None:
                return None
            job, incident = active, _with_return(state, active.incident, event)
        case WorkerLost() if not event.late:
            job = state.jobs[event.job_id]
            incident = _with_setback(job, _worker_lost(job, event, unix))
            seen = [event.evidence] if event.evidence is not None else []
            incident = _with_evidence(incident, seen, unix)
        case NodeDrained():
            if event.job_id is None:
                return None
            job = state.jobs[event.job_id]
            incident = _with_setback(job, _drained(job, event, unix))
        case NodeLeftOut() | NodeReset():
            job = state.jobs[event.job_id]
            if not job.has_member(event.node):
                return None
            incident = _with_setback(job, _put_out(job, event, unix))
        case JobRestored():
            job = state.jobs[event.job_id]
            if job.incident is None:
                return None
            lost_steps = job.incident.lost_steps + event.lost_steps
            incident = replace(job.incident, lost_steps=lost_steps)
        case JobCaughtUp():
            job = state.jobs[event.job_id]
            incident = job.incident
        case PlanMade():
            job = state.jobs[event.job_id]
            incident = _with_plan(job, event, unix)
        case FirstStepCommitted() | JobSucceeded() | JobFailed() | JobCancelled():
            job = state.jobs[event.job_id]
            incident = _at_end(job, event, unix)
        case _:
            return None
    return None if incident is None else (job, incident)


def closes(job: Job, event: Journaled) -> bool:
    """Whether an incident of `job`, as the event finds it, is over with the event."""
    if isinstance(event, FirstStepCommitted):
        return not job.losses and event.step >= job.rollback.redo_until
    if isinstance(event, JobCaughtUp):
        return not job.losses and (not job.on_the_way or job.made is None or job.made.boundary)
    return isinstance(event, JobSucceeded | JobFailed | JobCancelled)


def _with_setback(job: Job, setback: Setback) -> Incident:
    incident = job.incident or Incident(
        number=job.incidents + 1, from_generation=job.generation, members=len(job.members)
    )
    return replace(incident, setbacks=(*incident.setbacks, setback))


def _with_return(state: ClusterState, incident: Incident, event: NodeRegistered) -> Incident:
    """A node that was lost is back, perhaps with the agent of before."""
    name, known = event.facts.node, state.nodes.get(event.facts.node)
    same = known is not None and known.facts.incarnation == event.facts.incarnation
    setbacks = tuple(
        replace(setback, back="same agent" if same else "another agent")
        if setback.kind == "node lost" and setback.node == name and not setback.back
        else setback
        for setback in incident.setbacks
    )
    return replace(incident, setbacks=setbacks)


def _node_lost(job: Job, event: NodeLost, unix: float) -> Setback:
    return Setback(
        kind="agent restarted" if event.cause == "restarted" else "node lost",
        node=event.node,
        ranks=_ranks(job, event.node),
        reason=event.reason,
        evidence_at=unix - event.detect_s,
        declared_at=unix,
        found_by="lease" if event.cause == "lease" else "",
    )


def _worker_lost(job: Job, event: WorkerLost, unix: float) -> Setback:
    seen = event.evidence
    exited = seen.exited if seen is not None else None
    return Setback(
        kind="hang" if event.hung else "worker died",
        node=event.worker.node,
        worker=event.worker,
        ranks=_ranks(job, event.worker.node, event.worker),
        pid=exited.pid if exited else None,
        signal=exited.signal if exited else None,
        exit_code=exited.exit_code if exited else None,
        exception=event.words,
        log_tail=tuple(exited.log_tail.splitlines()) if exited else (),
        reason=event.reason,
        evidence_at=unix - (seen.ago_s if seen is not None else event.detect_s),
        declared_at=unix,
        lost_peer=event.lost_peer,
    )


def _drained(job: Job, event: NodeDrained, unix: float) -> Setback:
    return Setback(
        kind="drained by force",
        node=event.node,
        ranks=_ranks(job, event.node),
        reason=event.reason,
        evidence_at=unix,
        declared_at=unix,
    )


def _put_out(job: Job, event: NodeLeftOut | NodeReset, unix: float) -> Setback:
    hangs = isinstance(event, NodeReset)
    kind: Kind = "hang" if hangs else "node unfit"
    if isinstance(event, NodeReset) and event.cut_off:
        kind = "network cut"
    doubts = job.incident.setbacks if job.incident is not None else ()
    vague = ("no progress", "peers disconnected") if kind == "network cut" else ("no progress",)
    detect_s = event.detect_s if isinstance(event, NodeReset) else 0.0
    since = min((s.evidence_at for s in doubts if s.kind in vague), default=unix - detect_s)
    return Setback(
        kind=kind,
        node=event.node,
        ranks=_ranks(job, event.node),
        reason=event.reason,
        evidence_at=since if hangs else unix,
        declared_at=unix,
        found_by="progress" if kind == "hang" else "",
    )


def _with_plan(job: Job, event: PlanMade, unix: float) -> Incident | None:
    incident = job.incident
    if event.cause in ("peers lost", "no progress") and not job.losses:
        kind: Kind = "no progress" if event.cause == "no progress" else "peers disconnected"
        if incident is None or all(s.kind != kind for s in incident.setbacks):
            setback = Setback(
                kind=kind,
                reason=event.reason,
                evidence_at=unix - event.detect_s,
                declared_at=unix,
                found_by="progress" if kind == "no progress" else "",
            )
            incident = _with_setback(job, setback)
    if incident is None:
        return None
    incident = _with_transition(job, incident, event.overtaken, unix)
    if event.boundary:
        return incident  # it answers nothing, and training goes on
    attempt = Attempt(generation=event.plan.generation, cause=event.cause, rule=event.rule)
    incident = replace(incident, attempts=(*incident.attempts, attempt))
    return _with_evidence(incident, event.evidence, unix)


def _at_end(
    job: Job, event: FirstStepCommitted | JobSucceeded | JobFailed | JobCancelled, unix: float
) -> Incident | None:
    incident = job.incident
    if isinstance(event, JobFailed):
        guilty = _job_error(job, event, unix)
        if incident is None or guilty.kind in ("job error", "node unfit"):
            incident = _with_setback(job, guilty)
    if incident is None:
        return None
    incident = _with_transition(job, incident, event.transition, unix)
    if isinstance(event, FirstStepCommitted | JobFailed):
        incident = _with_evidence(incident, event.evidence, unix)
    if isinstance(event, FirstStepCommitted) and incident.trained_until is None:
        # By another host's calendar, which need not be ours to the second.
        counts = incident.opened_at + _ON_S < event.trained_until <= unix
        incident = replace(incident, trained_until=event.trained_until if counts else 0.0)
    return incident


def _job_error(job: Job, event: JobFailed, unix: float) -> Setback:
    """Who said what the job failed of; where nobody did, it is the master's verdict."""
    words = next((s for s in event.evidence if s.by == "worker" and s.saw in event.reason), None)
    if words is None:
        return Setback(kind="job failed", reason=event.reason, evidence_at=unix, declared_at=unix)
    node = words.observer.partition("/")[0]
    worker = next((w for w in job.processes() if str(w) == words.observer), None)
    ended = next((s.exited for s in event.evidence if s.about == words.observer and s.exited), None)
    return Setback(
        kind="job error" if event.node is None else "node unfit",
        node=node,
        worker=worker,
        ranks=_ranks(job, node, worker) if worker is not None else (),
        pid=ended.pid if ended else None,
        exit_code=ended.exit_code if ended else None,
        exception=event.reason,
        log_tail=tuple(ended.log_tail.splitlines()) if ended else (),
        reason=event.reason,
        evidence_at=unix - words.ago_s,
        declared_at=unix,
    )


def _with_transition(
    job: Job, incident: Incident, transition: Transition | None, unix: float
) -> Incident:
    """How the newest generation went, if it is one that answers the incident."""
    last = incident.attempts[-1] if incident.attempts else None
    if transition is None or last is None or last.generation != job.generation:
        return incident
    last = replace(last, transition=transition, ended_at=unix)
    return replace(incident, attempts=(*incident.attempts[:-1], last))


def _with_evidence(incident: Incident, found: Iterable[Evidence], unix: float) -> Incident:
    known = {_key(dated.what) for dated in incident.evidence}
    new = [
        DatedEvidence(at=unix - evidence.ago_s, what=replace(evidence, ago_s=0.0))
        for evidence in found
        if _key(evidence) not in known
    ]
    evidence = (*incident.evidence, *new)[:MOST_EVIDENCE]
    setbacks = _with_late_words(incident.setbacks, new)
    return replace(incident, evidence=evidence, setbacks=setbacks)


def _with_late_words(
    setbacks: tuple[Setback, ...], found: Iterable[DatedEvidence]
) -> tuple[Setback, ...]:
    """A master that comes back finds a process gone before its agent has told how it ended."""
    known = {setback.pid for setback in setbacks}
    ends = {
        dated.what.about: dated.what.exited
        for dated in found
        if dated.what.exited is not None and dated.what.exited.pid not in known
    }
    return tuple(
        _explained(setback, ends[str(setback.worker)])
        if setback.kind == "worker died" and setback.pid is None and str(setback.worker) in ends
        else setback
        for setback in setbacks
    )


def _explained(setback: Setback, exited: WorkerExited) -> Setback:
    return replace(
        setback,
        pid=exited.pid,
        signal=exited.signal,
        exit_code=exited.exit_code,
        log_tail=tuple(exited.log_tail.splitlines()),
        reason=describe_exit(exited),
    )


def _key(evidence: Evidence) -> tuple[str, str, str, str]:
    return evidence.by, evidence.observer, evidence.about, evidence.saw


def _ranks(job: Job, node: str, worker: WorkerId | None = None) -> tuple[int, ...]:
    """In the newest plan, whose workers stand in order, those of a node side by side."""
    workers = job.made.plan.workers if job.made is not None else ()
    first = bisect_left(workers, node, key=_node)
    end = bisect_right(workers, node, key=_node)
    return tuple(r for r in range(first, end) if worker is None or workers[r] == worker)


def _node(worker: WorkerId) -> str:
    return worker.node

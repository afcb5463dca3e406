"""Incidents, updated by each event: from the first loss to the step, or the job's end, that closes
them.

They follow from journaled events alone, so a restarted master knows the same. They are computed
from the state before the event changes it. Must not know how events.jsonl describes an incident.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from oobleck.core.ids import JobId
from oobleck.master.events import jobs, nodes
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.incident import (
    MOST_EVIDENCE,
    Attempt,
    DatedEvidence,
    Incident,
    Kind,
    Setback,
    describe_exit,
    own_words,
    ranks_of,
    with_stats,
)
from oobleck.master.state.job import Job
from oobleck.proto.types import WorkerExited

replace = msgspec.structs.replace
#: Least seconds of training after the first evidence that are reported.
_ON_S = 1.0


def incident_after(
    state: ClusterState, event: Journaled, unix: float
) -> tuple[Job, Incident] | None:
    """Return the job that `event` is about, and its incident updated by the event; None: it changes
    none. `closes` says whether the event ends the incident."""
    # Losses and returns of nodes concern the active job; other events name theirs.
    named: JobId | None = getattr(event, "job_id", None)
    job_id = state.active if isinstance(event, nodes.NodeLost | nodes.NodeRegistered) else named
    job = state.jobs.get(job_id) if job_id is not None else None
    if job is None or (incident := _after(state, job, event, unix)) is None:
        return None
    return job, incident


def _after(state: ClusterState, job: Job, event: Journaled, unix: float) -> Incident | None:
    incident = job.incident
    match event:
        case nodes.NodeLost() if job.current.has_member(event.node):
            setback = _setback(
                job,
                "agent restarted" if event.cause == "restarted" else "node lost",
                event.node,
                event.reason,
                unix,
                ago_s=event.detect_s,
                found_by="lease" if event.cause == "lease" else "",
                with_master=event.with_master,
            )
            return _with_evidence(_with_setback(job, setback), event.evidence, unix)
        case nodes.NodeRegistered() if incident is not None:
            return _with_return(state, incident, event)
        case nodes.WorkerLost() if not event.late:
            incident = _with_setback(job, _worker_lost(job, event, unix))
            return _with_evidence(incident, [event.evidence] if event.evidence else [], unix)
        case nodes.NodeDrained():
            setback = _setback(job, "drained by force", event.node, event.reason, unix)
            return _with_setback(job, setback)
        case nodes.NodeLeftOut() if job.current.has_member(event.node):
            return _with_setback(job, _setback(job, "node unfit", event.node, event.reason, unix))
        case nodes.NodeReset() if job.current.has_member(event.node):
            return _with_setback(job, _reset(job, event, unix))
        case jobs.JobRestored() if incident is not None:
            return replace(incident, lost_steps=incident.lost_steps + event.lost_steps)
        case jobs.JobCaughtUp():
            return incident
        case jobs.PlanMade():
            return _with_plan(job, event, unix)
        case (
            jobs.FirstStepCommitted() | jobs.JobSucceeded() | jobs.JobFailed() | jobs.JobCancelled()
        ):
            return _at_end(state, job, event, unix)
        case _:
            return None


def own_error_after(
    state: ClusterState, event: Journaled, unix: float
) -> tuple[Job, Incident] | None:
    """Return the failed job and its own error as an incident of its own, if `event` fails a job by
    an error unrelated to its open incident; else None."""
    if not isinstance(event, jobs.JobFailed):
        return None
    job = state.jobs[event.job_id]
    split = _split(job, event, unix)
    return None if split is None else (job, split[1])


def _split(job: Job, event: jobs.JobFailed, unix: float) -> tuple[Incident, Incident] | None:
    """Return the open incident and the job's own error as another incident; None: they are one."""
    error = _job_error(job, event, unix)
    if job.incident is None or error.kind != "job error":
        return None
    apart = replace(_opened(job), setbacks=(error,))
    return _with_evidence(job.incident, event.evidence, unix).split(apart)


def closes(job: Job, event: Journaled) -> bool:
    """Return whether `event` ends the incident of `job`. `job` is as before the event."""
    if isinstance(event, jobs.FirstStepCommitted):
        return not job.current.losses and event.step >= job.rollback.redo_until
    if isinstance(event, jobs.JobCaughtUp):
        current = job.current
        at_rest = not current.on_the_way or current.made is None or current.made.boundary
        return at_rest and not current.losses
    return isinstance(event, jobs.JobEnded)


def _opened(job: Job) -> Incident:
    """Return a new incident of the job, without setbacks."""
    return Incident(
        number=job.incidents + 1,
        from_generation=job.current.generation,
        members=len(job.current.members),
    )


def _with_setback(job: Job, setback: Setback) -> Incident:
    incident = job.incident or _opened(job)
    return replace(incident, setbacks=(*incident.setbacks, setback))


def _with_return(state: ClusterState, incident: Incident, event: nodes.NodeRegistered) -> Incident:
    """Note that a lost node is back, perhaps with the same agent."""
    name, known = event.facts.node, state.nodes.get(event.facts.node)
    same = known is not None and known.facts.incarnation == event.facts.incarnation
    setbacks = tuple(
        replace(setback, back="same agent" if same else "another agent")
        if setback.kind == "node lost" and setback.node == name and not setback.back
        else setback
        for setback in incident.setbacks
    )
    return replace(incident, setbacks=setbacks)


def _setback(
    job: Job, kind: Kind, node: str, reason: str, unix: float, *, ago_s: float = 0.0, **more: Any
) -> Setback:
    """Build a setback that is declared now, with its first evidence `ago_s` before."""
    return Setback(
        kind=kind,
        node=node,
        reason=reason,
        evidence_at=unix - ago_s,
        declared_at=unix,
        **{"ranks": ranks_of(job.current.made, node), **more},
    )


def _end_of(exited: WorkerExited | None) -> dict[str, Any]:
    """Return the fields of a setback that describe how a process ended."""
    if exited is None:
        return {}
    return {
        "pid": exited.pid,
        "signal": exited.signal,
        "exit_code": exited.exit_code,
        "log_tail": tuple(exited.log_tail.splitlines()),
    }


def _worker_lost(job: Job, event: nodes.WorkerLost, unix: float) -> Setback:
    seen, node = event.evidence, event.worker.node
    return _setback(
        job,
        "hang" if event.hung else "worker died",
        node,
        event.reason,
        unix,
        ago_s=seen.ago_s if seen is not None else event.detect_s,
        worker=event.worker,
        ranks=ranks_of(job.current.made, node, event.worker),
        exception=event.words,
        lost_peer=event.lost_peer,
        **_end_of(seen.exited if seen is not None else None),
    )


def _reset(job: Job, event: nodes.NodeReset, unix: float) -> Setback:
    """Return the setback of a reset node, dated from the first sign of trouble."""
    doubts = job.incident.setbacks if job.incident is not None else ()
    vague = ("no progress", "peers disconnected") if event.cut_off else ("no progress",)
    since = min(
        (doubt.evidence_at for doubt in doubts if doubt.kind in vague),
        default=unix - event.detect_s,
    )
    return _setback(
        job,
        "network cut" if event.cut_off else "hang",
        event.node,
        event.reason,
        unix,
        ago_s=unix - since,
        found_by="" if event.cut_off else "progress",
    )


def _with_plan(job: Job, event: jobs.PlanMade, unix: float) -> Incident | None:
    incident = job.incident
    if event.cause in ("peers lost", "no progress") and not job.current.losses:
        kind: Kind = "no progress" if event.cause == "no progress" else "peers disconnected"
        if incident is None or all(s.kind != kind for s in incident.setbacks):
            found_by = "progress" if kind == "no progress" else ""
            setback = _setback(
                job, kind, "", event.reason, unix, ago_s=event.detect_s, found_by=found_by
            )
            incident = _with_setback(job, setback)
    if incident is None:
        return None
    attempts = with_stats(incident.attempts, job.current.generation, event.overtaken, unix)
    incident = replace(incident, attempts=attempts)
    if event.boundary:
        return incident  # the plan is no answer to it: training continues
    attempt = Attempt(generation=event.plan.generation, cause=event.cause, rule=event.rule)
    incident = replace(incident, attempts=(*incident.attempts, attempt))
    return _with_evidence(incident, event.evidence, unix)


def _at_end(
    state: ClusterState,
    job: Job,
    event: jobs.FirstStepCommitted | jobs.JobEnded,
    unix: float,
) -> Incident | None:
    incident = job.incident
    if isinstance(event, jobs.JobFailed):
        guilty = _job_error(job, event, unix)
        if split := _split(job, event, unix):
            incident, _ = split
        elif incident is None or guilty.kind in ("job error", "node unfit"):
            incident = _with_evidence(_with_setback(job, guilty), event.evidence, unix)
        else:
            incident = _with_evidence(incident, event.evidence, unix)
    if incident is None:
        return None
    attempts = with_stats(incident.attempts, job.current.generation, event.transition, unix)
    incident = replace(incident, attempts=attempts)
    if isinstance(event, jobs.FirstStepCommitted):
        incident = _with_evidence(incident, event.evidence, unix)
        if incident.trained_until is None:
            # By another host's clock, which may be off by seconds.
            counts = incident.opened_at + _ON_S < event.trained_until <= unix
            incident = replace(incident, trained_until=event.trained_until if counts else 0.0)
    return incident


def _job_error(job: Job, event: jobs.JobFailed, unix: float) -> Setback:
    """Return the setback of a failed job; it names the worker that reported the error, if one
    did."""
    if (words := own_words(event)) is None:
        return _setback(job, "job failed", "", event.reason, unix)
    node = words.observer.partition("/")[0]
    worker = next((w for w in job.current.processes() if str(w) == words.observer), None)
    ended = next((s.exited for s in event.evidence if s.about == words.observer and s.exited), None)
    return _setback(
        job,
        "job error" if event.node is None else "node unfit",
        node,
        event.reason,
        unix,
        ago_s=words.ago_s,
        worker=worker,
        ranks=ranks_of(job.current.made, node, worker) if worker is not None else (),
        exception=event.reason,
        **_end_of(ended),
    )


def _with_evidence(
    incident: Incident, observations: Iterable[jobs.Evidence], unix: float
) -> Incident:
    known = {_key(dated.what) for dated in incident.evidence}
    new = [
        DatedEvidence(at=unix - evidence.ago_s, what=replace(evidence, ago_s=0.0))
        for evidence in observations
        if _key(evidence) not in known
    ]
    evidence = (*incident.evidence, *new)[:MOST_EVIDENCE]
    setbacks = _with_late_words(incident.setbacks, new)
    return replace(incident, evidence=evidence, setbacks=setbacks)


def _with_late_words(
    setbacks: tuple[Setback, ...], evidence: Iterable[DatedEvidence]
) -> tuple[Setback, ...]:
    """Add late reports of exits to setbacks of processes that a restarted master had found gone."""
    known = {setback.pid for setback in setbacks}
    ends = {
        dated.what.about: dated.what.exited
        for dated in evidence
        if dated.what.exited is not None and dated.what.exited.pid not in known
    }
    return tuple(
        replace(setback, **_end_of(exited), reason=describe_exit(exited))
        if setback.kind == "worker died"
        and setback.pid is None
        and (exited := ends.get(str(setback.worker))) is not None
        else setback
        for setback in setbacks
    )


def _key(evidence: jobs.Evidence) -> tuple[str, str, str, str]:
    return evidence.by, evidence.observer, evidence.about, evidence.saw

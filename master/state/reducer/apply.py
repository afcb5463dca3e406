"""Application of events to the state: the only way to write to a `ClusterState`.

Owns the order of an event's effects. Incidents and the ends of slow processes come first, while the
state is as it was before. Then comes the event itself, by its subject, and then the consequences
for the nodes.
"""

from msgspec.structs import replace

from oobleck.master.events.nodes import NodeEvent, UnknownJobEnded
from oobleck.master.events.plans import FirstStepCommitted, PlanEvent, PlanMade
from oobleck.master.events.reports import Observed
from oobleck.master.events.trust import TrustChanged
from oobleck.master.events.unions import Event, JournalCut, Journaled, MasterStarted, TermBegan
from oobleck.master.state import rates, trust
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.desired import follow, next_version
from oobleck.master.state.history import Term
from oobleck.master.state.incidents.incident import LastIncident
from oobleck.master.state.incidents.incident_summary import slowdown_summary, summary_of
from oobleck.master.state.incidents.incidents import closes, incident_after
from oobleck.master.state.incidents.slowdowns import slowdown_after
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.job_observed import JobSeen
from oobleck.master.state.job_states import note_loss
from oobleck.master.state.reducer import apply_jobs, apply_nodes, apply_plans
from oobleck.master.state.reducer.apply_reports import observe


def apply(state: ClusterState, event: Event, *, now: float, unix: float) -> bool:
    """Change `state` by `event`, which came at `now` (this process's clock) and `unix` (the
    calendar's). Returns whether anything changed that a decision could depend on."""
    if isinstance(event, Observed):
        return observe(state, event, now)
    state.sequence += 1
    _follow_incident(state, event, unix)
    _follow_slowdown(state, event, unix)
    rates.forget(state, event)
    _apply_event(state, event, now, unix)
    follow(state, event, now, unix)
    return True


def _follow_incident(state: ClusterState, event: Journaled, unix: float) -> None:
    found = incident_after(state, event, unix)
    if found is None:
        return
    job, incident = found
    if incident.number > job.incidents:
        job.incidents = incident.number
    if isinstance(event, PlanMade | FirstStepCommitted):
        job.seen.evidence.clear()  # the event carries them
    if closes(job, event):
        _note_last(job, incident.number, summary_of(incident, event, unix), unix)
        job.seen.evidence.clear()
    job.incident = None if closes(job, event) else incident


def _follow_slowdown(state: ClusterState, event: Journaled, unix: float) -> None:
    found = slowdown_after(state, event, unix)
    if found is None:
        return
    job, slowdown = found
    job.incidents = max(job.incidents, slowdown.number)
    if slowdown.is_over:
        _note_last(job, slowdown.number, slowdown_summary(slowdown, event, unix), unix)
    job.slowdown = None if slowdown.is_over else slowdown


def _note_last(job: Job, number: int, summary: str, unix: float) -> None:
    """A failure that began in a slowdown is newer, whichever ends first."""
    if job.last_incident is None or number > job.last_incident.number:
        job.last_incident = LastIncident(number=number, at=unix, summary=summary)


def _apply_event(state: ClusterState, event: Journaled, now: float, unix: float) -> None:
    if isinstance(event, MasterStarted):
        state.history.start(event.start, state.sequence)
        _observe_anew(state, now, unix)
    elif isinstance(event, TermBegan):
        _begin_term(state, event)
    elif isinstance(event, UnknownJobEnded):
        apply_nodes.end_unknown(state, event)
    elif isinstance(event, JournalCut):
        _distrust(state, unix)
    elif isinstance(event, NodeEvent):
        apply_nodes.apply(state, event, now, unix)
    elif isinstance(event, PlanEvent):
        apply_plans.apply(state, event, now, unix)
    elif isinstance(event, TrustChanged):
        trust.apply(state.trust, event, unix)
    else:
        apply_jobs.apply(state, event, now, unix)


def _begin_term(state: ClusterState, event: TermBegan) -> None:
    history = state.history
    history.id, history.cluster = event.history, event.cluster
    term = Term(
        number=event.number,
        begun_by=event.begun_by,
        place=event.place,
        since=history.starts[-1].since if history.starts else state.sequence,
        reason=event.reason,
    )
    # A journal may be named anew in its term, as when its cluster gets an authority.
    if history.term is not None and history.term.begun_by == event.begun_by:
        history.terms[-1] = replace(history.terms[-1], place=event.place)
    else:
        history.terms.append(term)
    state.began_term, state.superseded = len(history.terms) > 1, None


def _observe_anew(state: ClusterState, now: float, unix: float) -> None:
    state.began_term, state.behind, state.superseded = False, None, None
    for node in state.nodes.values():
        apply_nodes.restarted(node, now, unix)
    for job in state.jobs.values():
        job.seen = JobSeen(since=now, since_unix=unix, inherited=True)
        job.set_stand_bys(job.stand_bys, now, unix)
        job.seen.steps.committed_step = job.rollback.resumed_step
        if job.rollback.redo_until and job.rollback.restored is not None:
            job.seen.steps.furthest_step = job.rollback.restored.step
        if job.profiling.under_way is not None:
            job.seen.profiling.measuring_since = now
        if job.current.losses:
            opened_at = job.incident.opened_at if job.incident is not None else unix
            note_loss(job, now, detect_s=max(0.0, unix - opened_at))
        if job.current.made is not None:
            job.seen.progressed_at = job.seen.planned_at = now


def _distrust(state: ClusterState, unix: float) -> None:
    """The events that are gone may have been acted on, with newer versions than are known."""
    for node in state.nodes.values():
        node.desired = replace(node.desired, version=next_version(node, unix))
    for job in state.jobs.values():
        if job.state not in ENDED:
            job.journal_cut_at = unix

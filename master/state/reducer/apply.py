"""Application of events to the state: the only way to write to a `ClusterState`.

Owns the order of an event's effects. First, incidents and ends of slow processes, which need the
state before the event. Then the event itself, by its subject. Last, the nodes' desired states
(`Node.desired`). The desired state of a node depends on the active job and on that node alone. So
an event that does not change the job updates only its own node.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from oobleck.core.ids import NodeName
from oobleck.master.events.jobs import FirstStepCommitted, PlanEvent, PlanMade
from oobleck.master.events.nodes import (
    NodeEvent,
    NodeForgotten,
    NodeLost,
    NodeRegistered,
    UnknownJobEnded,
    WorkerLost,
)
from oobleck.master.events.trust import TrustChanged
from oobleck.master.events.unions import (
    Event,
    JournalCut,
    Journaled,
    MasterStarted,
    Observed,
    TermBegan,
)
from oobleck.master.state import slowdowns, trust
from oobleck.master.state.cluster import ClusterState, Term
from oobleck.master.state.incident import LastIncident
from oobleck.master.state.incident_summary import slowdown_summary, summary_of
from oobleck.master.state.incidents import closes, incident_after, own_error_after
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.job_observed import JobSeen
from oobleck.master.state.job_states import note_loss
from oobleck.master.state.node import Build, Desired, Node
from oobleck.master.state.reducer import apply_jobs, apply_nodes
from oobleck.master.state.reducer.apply_reports import observe
from oobleck.master.state.slowdowns import slowdown_after


def follow(state: ClusterState, event: Journaled, now: float, unix: float) -> None:
    """Update the nodes' desired states after `event`. Versions are from Unix time, so that they
    grow even if a journal was lost."""
    if isinstance(event, TrustChanged):
        return
    asked, members = _asked_of_all(state), _members(state)
    names: Iterable[NodeName] = state.nodes
    if isinstance(event, NodeEvent) and asked == state.asked_of_all:
        names = (_node_of(event),)
    state.asked_of_all = asked
    for name in names:
        if (node := state.nodes.get(name)) is not None:
            _set(state, node, name in members, now, unix)


def _members(state: ClusterState) -> set[NodeName]:
    """Return the nodes that are in the newest plan or that it still needs."""
    job = state.job
    return set() if job is None else {*job.current.members, *job.current.leaving}


def _asked_of_all(state: ClusterState) -> tuple[int | None, Build]:
    """Return the workers per node, and the build, that the active job asks for."""
    job = state.job
    return (None, Build()) if job is None else (state.worker_slots(job), state.required_build(job))


def _node_of(event: NodeEvent) -> NodeName:
    match event:
        case NodeRegistered():
            return event.facts.node
        case WorkerLost():
            return event.worker.node
        case _:
            return event.node


def _set(state: ClusterState, node: Node, member: bool, now: float, unix: float) -> None:
    before, wanted = node.desired, _wanted(state, node, member)
    if before != wanted:
        if before.job_id != wanted.job_id:
            node.seen.ready_at = None
        node.desired = replace(wanted, version=next_version(node, unix))
    if wanted.job_id is None:
        node.seen.assigned_at = None
    elif node.seen.assigned_at is None:
        node.seen.assigned_at = now


def _wanted(state: ClusterState, node: Node, member: bool) -> Desired:
    """Return the node's desired state, with its current version."""
    job = state.job
    works, generation, attempt, save, alone = False, None, 0, 0, False
    if job is not None:
        works = state.is_candidate(node, job, *state.asked_of_all) or (member and node.moves_off)
        if works and member:
            generation = job.current.generation
            save = job.saves.requested if job.saves.answered < job.saves.requested else 0
        elif works and job.profiling.under_way is not None:
            attempt = job.profiling.under_way.wish.attempt
        elif works:
            alone = node.facts.node in job.standing_by and not _may_be_asked(node, job)
        works = works or _keeps_state(node, job)
    return Desired(
        version=node.desired.version,
        job_id=job.id if job is not None and works else None,
        generation=generation,
        attempt=attempt,
        save=save,
        alone=alone,
        drained=node.drain is not None and node.drain.done,
    )


def _may_be_asked(node: Node, job: Job) -> bool:
    """Return whether the job may still need the node's layers."""
    return any(node.facts.node in plan.nodes for plan in job.lineage.plans.values())


def _keeps_state(node: Node, job: Job) -> bool:
    """Return whether a node in quarantine keeps workers, whose layers may still be needed."""
    name = node.facts.node
    return (
        node.registered
        and node.is_clear
        and node.is_quarantined
        and (name in job.current.lost_nodes or job.current.on_the_way)
        and job.current.trained is not None
        and name in job.current.trained.plan.nodes
        and name not in job.lineage.emptied
        and name not in job.left_out
    )


def next_version(node: Node, unix: float) -> int:
    return max(node.desired.version + 1, int(unix * 1000))


def apply(state: ClusterState, event: Event, *, now: float, unix: float) -> bool:
    """Change `state` by `event`, which arrived at `now` (this process's clock) and `unix` (the
    calendar's). Return whether anything changed that a decision could depend on."""
    if isinstance(event, Observed):
        return observe(state, event, now)
    state.sequence += 1
    _follow_incident(state, event, unix)
    _follow_slowdown(state, event, unix)
    slowdowns.forget_slow(state, event)
    _apply_event(state, event, now, unix)
    follow(state, event, now, unix)
    return True


def _follow_incident(state: ClusterState, event: Journaled, unix: float) -> None:
    found, apart = incident_after(state, event, unix), own_error_after(state, event, unix)
    if found is None:
        return
    job, incident = found
    if incident.number > job.incidents:
        job.incidents = incident.number
    if isinstance(event, PlanMade | FirstStepCommitted):
        job.seen.evidence.clear()  # the event has them
    if closes(job, event):
        _note_last(job, incident.number, summary_of(incident, event, unix), unix)
        job.seen.evidence.clear()
    job.incident = None if closes(job, event) else incident
    if apart is not None:
        job.incidents = apart[1].number
        _note_last(job, apart[1].number, summary_of(apart[1], event, unix), unix)


def _follow_slowdown(state: ClusterState, event: Journaled, unix: float) -> None:
    with_event = slowdown_after(state, event, unix)
    if with_event is None:
        return
    job, slowdown = with_event
    job.incidents = max(job.incidents, slowdown.number)
    if slowdown.is_over:
        _note_last(job, slowdown.number, slowdown_summary(slowdown, event, unix), unix)
    job.slowdown = None if slowdown.is_over else slowdown


def _note_last(job: Job, number: int, summary: str, unix: float) -> None:
    """Note the last incident: the one that began last, even if a slowdown ends after it."""
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
        _count_losses(state, event, unix)
        apply_nodes.apply(state, event, now, unix)
    elif isinstance(event, PlanEvent):
        apply_jobs.apply_plan(state, event, now, unix)
    elif isinstance(event, TrustChanged):
        trust.apply(state.trust, event, unix)
    else:
        apply_jobs.apply(state, event, now, unix)


def _count_losses(state: ClusterState, event: NodeEvent, unix: float) -> None:
    """Count a loss or a return of a node. An orderly end is no loss: it says nothing about
    failures."""
    if not isinstance(event, NodeLost | NodeRegistered | NodeForgotten):
        return
    state.losses.pass_time(unix, _live(state))
    if isinstance(event, NodeLost) and event.cause != "left":
        rack = state.nodes[event.node].facts.rack
        others = (node for name, node in state.nodes.items() if name != event.node)
        left = sum(node.registered and node.facts.rack == rack for node in others)
        state.losses.lose(event.node, unix, rack, left)
    elif isinstance(event, NodeRegistered):
        state.losses.come(event.facts.node, unix)


def _live(state: ClusterState) -> int:
    return sum(node.registered for node in state.nodes.values())


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
    # The same term again: only the cluster's identity changes, as when it gets an authority.
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
        job.seen = JobSeen(since=now, since_unix=unix, clock=unix - now, inherited=True)
        job.set_stand_bys(job.stand_bys, now, unix)
        job.seen.steps.committed_step = job.rollback.resumed_step
        job.seen.steps.recorded_step = job.rollback.resumed_step
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
    """Raise the nodes' versions, since lost events may have had newer ones."""
    for node in state.nodes.values():
        node.desired = replace(node.desired, version=next_version(node, unix))
    for job in state.jobs.values():
        if job.state not in ENDED:
            job.journal_cut_at = unix

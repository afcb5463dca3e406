"""Admission of nodes to the cluster: the answer to an agent that registers. Pure.

Agents outlive a master's disk, so an agent may know more than this master: a later term, later
events, or a job. A master takes no node away from another head, and ends no worker of a job that
its own journal might lack.
"""

from collections.abc import Callable
from dataclasses import dataclass

from oobleck.core.ids import Incarnation
from oobleck.host.detection import Detection
from oobleck.master.events.nodes import NodeHeld, NodeLost, NodeRegistered
from oobleck.master.events.unions import Journaled, TermBegan
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.leases import last_sign, reconnect_s
from oobleck.master.state.node import Node
from oobleck.proto.protocol import common, refusal
from oobleck.proto.types import Head, Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Refusal of a registration, and whether the agent is to retry."""

    reason: str
    #: The agent may try again later.
    temporary: bool
    #: Its certificate was revoked.
    revoked: bool = False
    #: The head that it follows instead of this one; None: the refusal has another reason.
    follows: Head | None = None


def admit(
    state: ClusterState, registration: Registration, now: float, timing: Detection
) -> Refusal | tuple[Journaled, ...]:
    """Return the events of an accepted registration, or the refusal."""
    facts = registration.facts
    spoken = (registration.protocol, facts.newest_protocol)
    if common(*spoken) is None:
        return Refusal(reason=refusal(facts.node, *spoken), temporary=False)
    if (other := _other_head(state, registration.acted_on)) is not None:
        return Refusal(
            reason=f"node {facts.node} follows another head, in {other}; this one is in "
            f"{state.head}: end the one that is not to go on",
            temporary=True,
            follows=other,
        )
    known = state.nodes.get(facts.node)
    same = known is not None and known.facts.incarnation == facts.incarnation
    booted = known is not None and facts.outlives(known.facts)
    if known is not None and known.registered and not same and not booted:
        in_use = _name_in_use(state, known, facts.incarnation, now, timing)
        if in_use is not None:
            return in_use
    if (others := _other_job(state, registration)) is not None:
        return _hold(known, registration, others)
    job = state.job
    counted = state.lacks(registration.running)
    if job is not None and (same or known is None):
        # No step was committed since the node was declared lost: its workers still count.
        counted |= facts.node in job.current.lost_nodes or _holds_state(job, registration)
    stale_workers = bool(registration.status.workers) and not counted
    registered = NodeRegistered(facts=facts, stale_workers=stale_workers)
    if known is None or not known.registered:
        return (registered,)
    if same:
        return ()
    restarted = NodeLost(
        node=facts.node,
        incarnation=known.facts.incarnation,
        cause="restarted",
        reason="its host was booted again" if booted else "its agent was started anew",
        detect_s=now - last_sign(state, known),
        with_master=known.seen.awaited and booted,
    )
    return (restarted, registered)


def next_term(
    state: ClusterState, acted_on: Head | None, new_id: Callable[[], str]
) -> TermBegan | None:
    """Return the term that this master begins when it hears of `acted_on`; None: none.

    An agent may have acted on events of this term that the journal lacks. Then the term is shared:
    this master runs from an old copy, or from a disk that has lost writes. A master that was
    started in a term of its own, from a backup or elsewhere, is the operator's choice. So it goes
    above all terms that agents report. The first head of a history does not: the operator has since
    chosen the copy.
    """
    own, history = state.head, state.history
    if acted_on is None or own is None or history.term is None or acted_on.history != own.history:
        return None
    if acted_on.start == own.start:
        return None  # the agent's newest events are from this process
    lacking = history.lacks(acted_on, own.sequence)
    if state.began_term:
        goes_on = acted_on.outranks(own)
    else:
        same = (acted_on.term, acted_on.begun_by) == (own.term, own.begun_by)
        goes_on = same and lacking > 0
    if not goes_on or history.next_number(acted_on.term) <= acted_on.term:
        return None
    return TermBegan(
        cluster=own.cluster,
        history=own.history,
        number=history.next_number(acted_on.term),
        begun_by=new_id(),
        place=history.term.place,
        reason=f"agents have heard of {lacking} events in term {acted_on.term} that this journal "
        "does not have",
    )


def _other_head(state: ClusterState, acted_on: Head | None) -> Head | None:
    """Return the head that the agent follows instead of this one."""
    own = state.head
    return acted_on if own is not None and acted_on is not None and acted_on.outranks(own) else None


def _other_job(state: ClusterState, registration: Registration) -> NodeHeld | None:
    """Return the hold if the node trains a job that the journal may have lost, or of which it may
    have lost the start; None: the node may serve this master."""
    node, job_id = registration.facts.node, registration.status.job_id
    acted_on = registration.acted_on
    if job_id is None or not registration.status.workers or acted_on is None or state.head is None:
        return None
    unknown = NodeHeld(node=node, job_id=job_id, queued=False)
    if (job := state.jobs.get(job_id)) is None:
        return unknown if state.history.lacks(acted_on, state.sequence) else None
    # Two heads of one history may have given the same id to two jobs.
    shared = state.history.shared(acted_on, state.sequence)
    if job.adopted_in is None and job.submitted_in > shared:
        return unknown
    begun = job.state == "queued" and state.lacks(registration.running)
    return NodeHeld(node=node, job_id=job_id, queued=True) if begun else None


def _hold(known: Node | None, registration: Registration, held: NodeHeld) -> tuple[Journaled, ...]:
    """Hold the node for its job."""
    facts = registration.facts
    registered = NodeRegistered(facts=facts)
    if known is None or not known.registered:
        return registered, held
    if known.facts.incarnation == facts.incarnation and known.held is not None:
        same = (known.held.job_id, known.held.queued) == (held.job_id, held.queued)
        return () if same else (held,)
    # The node has none of the workers that this master expects there.
    elsewhere = NodeLost(
        node=facts.node,
        incarnation=known.facts.incarnation,
        cause="restarted",
        reason=f"it trains job {held.job_id}, which this master "
        + ("has in its queue" if held.queued else "does not know"),
        detect_s=0.0,
    )
    return elsewhere, registered, held


def _holds_state(job: Job, registration: Registration) -> bool:
    """Return whether the node's workers may hold layers by a plan that no committed step has
    outdated."""
    node, status = registration.facts.node, registration.status
    return status.job_id == job.id and any(
        worker.generation in job.lineage.plans
        and node in job.lineage.plans[worker.generation].nodes
        for worker in status.workers
    )


def _both_live(known: Node, newer: Incarnation, timing: Detection) -> bool:
    """Return whether the known agent was heard from well after the newer one registered, so that
    both live. A restarted agent may register before the end of the old one is noticed, and messages
    of the old one may arrive some time later."""
    rival = known.seen.rival
    since = rival[1] if rival is not None and rival[0] == newer else None
    return since is not None and known.seen.last_heard > since + 2 * timing.heartbeat_s


def _name_in_use(
    state: ClusterState, known: Node, newer: Incarnation, now: float, timing: Detection
) -> Refusal | None:
    old = known.facts
    name = old.node
    if known.connected:
        return Refusal(
            reason=f"node name {name} is in use by a live agent (pid {old.pid}, host "
            f"{old.hostname}); choose another --name",
            temporary=not _both_live(known, newer, timing),
        )
    if (
        known.seen.closed_at is None
        and state.job is not None
        and state.job.current.has_member(name)
    ):
        # This master has just started, so the agent that has the job's workers may still return.
        wait_s = reconnect_s(state, known, now, timing)
        return Refusal(
            reason=f"node name {name} belongs to another agent (pid {old.pid}, host "
            f"{old.hostname}) that has {wait_s:.1f} s left to reconnect",
            temporary=True,
        )
    return None

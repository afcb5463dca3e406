"""Who may be part of the cluster: the answer to an agent that registers. Pure."""

from dataclasses import dataclass

from oobleck.host.detection import Detection
from oobleck.master.events.nodes import NodeLost, NodeRegistered
from oobleck.master.events.unions import Journaled
from oobleck.master.rules.nodes.losses import last_sign, reconnect_s
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.ids import Incarnation
from oobleck.proto.protocol import common, refusal
from oobleck.proto.types import Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    reason: str
    #: The agent may try again later.
    temporary: bool


def admit(
    state: ClusterState, registration: Registration, now: float, timing: Detection
) -> Refusal | tuple[Journaled, ...]:
    """What is to be journaled of the registration, or why it is refused."""
    facts = registration.facts
    spoken = (registration.protocol, facts.newest_protocol)
    if common(*spoken) is None:
        return Refusal(reason=refusal(facts.node, *spoken), temporary=False)
    known = state.nodes.get(facts.node)
    job = state.job
    same = known is not None and known.facts.incarnation == facts.incarnation
    counted = state.lacks(registration.running)
    if job is not None and (same or known is None):
        # It was given up, and no step has been committed without it since: its workers count.
        counted |= facts.node in job.current.lost_nodes or _holds_state(job, registration)
    stale_workers = bool(registration.status.workers) and not counted
    registered = NodeRegistered(facts=facts, stale_workers=stale_workers)
    if known is None or not known.registered:
        return (registered,)
    if same:
        return ()
    in_use = _name_in_use(state, known, facts.incarnation, now, timing)
    if in_use is not None:
        return in_use
    restarted = NodeLost(
        node=facts.node,
        incarnation=known.facts.incarnation,
        cause="restarted",
        reason="its agent was started anew",
        detect_s=now - last_sign(state, known),
    )
    return (restarted, registered)


def _holds_state(job: Job, registration: Registration) -> bool:
    """Whether workers of the node may hold layers by a plan that no committed step has outdated."""
    node, status = registration.facts.node, registration.status
    return status.job_id == job.id and any(
        worker.generation in job.lineage.plans
        and node in job.lineage.plans[worker.generation].nodes
        for worker in status.workers
    )


def _both_live(known: Node, newer: Incarnation, timing: Detection) -> bool:
    """Whether the known agent has spoken since the newer one came. An agent that was started anew
    may come before its end is seen: the network or this master may have been away meanwhile. What
    the old one sent before its end may arrive some time after."""
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
        # This master has just started, and the agent with the job's workers may still come back.
        wait_s = reconnect_s(state, known, now, timing)
        return Refusal(
            reason=f"node name {name} belongs to another agent (pid {old.pid}, host "
            f"{old.hostname}) that has {wait_s:.1f} s left to reconnect",
            temporary=True,
        )
    return None

"""Desired state of every node, as it follows from the jobs and the nodes.

The only writer of `Node.desired`. The desired state of one node depends on the active job and on
that node alone. So an event that changes nothing of the job updates its own node only. Must not
know how it gets to the agents.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from oobleck.core.ids import NodeName
from oobleck.master.events.nodes import NodeEvent, NodeRegistered, WorkerLost
from oobleck.master.events.trust import TrustChanged
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Build, Desired, Node


def follow(state: ClusterState, event: Journaled, now: float, unix: float) -> None:
    """Bring what is desired of the nodes in line after `event`; a change gets a newer version.

    Versions follow the calendar, so that they grow even where a journal was lost. An event of a
    node changes it for that node alone, unless what the job asks of all nodes changes with it.
    """
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
    """Nodes that the newest plan has, or still needs."""
    job = state.job
    return set() if job is None else {*job.current.members, *job.current.leaving}


def _asked_of_all(state: ClusterState) -> tuple[int | None, Build]:
    """Workers per node, and the build, that the job which has its turn asks for."""
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
    """Return the node's desired state, under its present version."""
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
    """Return whether the job may still need what the node's workers hold."""
    return any(node.facts.node in plan.nodes for plan in job.lineage.plans.values())


def _keeps_state(node: Node, job: Job) -> bool:
    """Return whether a node in quarantine keeps its workers, since what they hold may be asked for
    until a step is committed without it."""
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

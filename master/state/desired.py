"""What is desired of every node, as it follows from the jobs and the nodes.

The only writer of `Node.desired`. What is desired of one node hangs on the active job and on that
node alone, so an event that changes nothing of the job is followed for its own node only. Must not
know how it gets to the agents.
"""

from dataclasses import replace

from oobleck.master.events.nodes import NodeRegistered, WorkerLost
from oobleck.master.events.unions import Event, JournalCut, MasterStarted
from oobleck.master.state import drains
from oobleck.master.state.cluster import ClusterState, Wanted
from oobleck.master.state.job import Job, nodes_of
from oobleck.master.state.node import Node
from oobleck.planner.ids import Generation, JobId, NodeName


def follow(state: ClusterState, event: Event, now: float, unix: float) -> None:
    """Bring what is desired of the nodes in line after `event`; a change gets a new version.

    Versions follow the calendar, so that they grow even where a journal was lost.
    """
    job = state.job
    wanted = _wanted(state, job) if job is not None else None
    before, state.wanted = state.wanted, wanted
    unchanged = wanted is None if before is None else before.same_but_for_losses(wanted)
    if isinstance(event, MasterStarted | JournalCut) or not unchanged:
        set_desired(state, now, unix)
        return
    names = _gone(before) ^ _gone(wanted)
    if (about := _node_of(event)) is not None:
        names |= {about}
    for name in sorted(names):
        if (node := state.nodes.get(name)) is not None:
            member = job is not None and (job.has_member(name) or name in job.leaving)
            _set(state, node, wanted, member=member, now=now, unix=unix)


def _gone(wanted: Wanted | None) -> frozenset[NodeName]:
    return nodes_of(wanted.losses) if wanted is not None else frozenset()


def set_desired(state: ClusterState, now: float, unix: float) -> None:
    """Bring what is desired of every node in line."""
    job = state.job
    members = {*job.members, *job.leaving} if job is not None else set()
    state.wanted = _wanted(state, job) if job is not None else None
    for name, node in state.nodes.items():
        _set(state, node, state.wanted, member=name in members, now=now, unix=unix)


def _wanted(state: ClusterState, job: Job) -> Wanted:
    return Wanted(
        job_id=job.id,
        slots=state.worker_slots(job),
        torch=state.required_torch(job),
        made=job.made,
        losses=job.losses,
        on_the_way=job.on_the_way,
        measuring=job.profiling.under_way,
        save=job.saves.requested if job.saves.answered < job.saves.requested else 0,
    )


def _node_of(event: Event) -> NodeName | None:
    """The one node that the event is about."""
    match event:
        case NodeRegistered():
            return event.facts.node
        case WorkerLost():
            return event.worker.node
        case _:
            node: NodeName | None = getattr(event, "node", None)
            return node


def _set(
    state: ClusterState,
    node: Node,
    wanted: Wanted | None,
    *,
    member: bool,
    now: float,
    unix: float,
) -> None:
    """`member`: the job's newest plan has the node, or still needs it."""
    desired = node.desired
    job_id: JobId | None = None
    generation: Generation | None = None
    attempt = save = 0
    if wanted is not None:
        job = state.jobs[wanted.job_id]
        candidate = state.is_candidate(node, job, wanted.slots, wanted.torch)
        if candidate or (member and drains.moves_off(node)):
            job_id = job.id
            if member:
                generation, save = job.generation, wanted.save
            elif job.profiling.under_way is not None:
                attempt = job.profiling.under_way.wish.attempt
        elif _keeps_state(node, job):
            job_id = job.id
    drained = node.drain is not None and node.drain.done
    if (
        desired.job_id != job_id
        or desired.generation != generation
        or desired.attempt != attempt
        or desired.save != save
        or desired.drained != drained
    ):
        if desired.job_id != job_id:
            node.seen.ready_at = None
        node.desired = replace(
            desired,
            version=next_version(node, unix),
            job_id=job_id,
            generation=generation,
            attempt=attempt,
            save=save,
            drained=drained,
        )
    if job_id is None:
        node.seen.assigned_at = None
    elif node.seen.assigned_at is None:
        node.seen.assigned_at = now


def _keeps_state(node: Node, job: Job) -> bool:
    """Whether the node is in quarantine, and what its workers hold may yet be asked for: until a
    step is committed without it."""
    name = node.facts.node
    return (
        node.registered
        and not node.stale_workers
        and drains.is_quarantined(node)
        and (name in job.lost_nodes or job.on_the_way)
        and job.trained is not None
        and name in job.trained.plan.nodes
        and name not in job.lineage.emptied
        and name not in job.left_out
    )


def next_version(node: Node, unix: float) -> int:
    return max(node.desired.version + 1, int(unix * 1000))

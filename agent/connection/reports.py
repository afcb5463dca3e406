"""Views of the state for the master: the status of the node, and reports of its workers.

Pure. Must not know when they are sent, nor how.
"""

import msgspec

from oobleck.agent.connection.outbox import HOLD_S, MOST_HOLD_S, NEXT_S
from oobleck.agent.state import NodeState
from oobleck.agent.worker import WorkerState
from oobleck.core.ids import NodeName
from oobleck.core.plan import Plan
from oobleck.proto import types


def report_of(worker: WorkerState, what: types.Happening) -> types.WorkerReport:
    return types.WorkerReport(
        job_id=worker.job_id, slot=worker.slot, incarnation=worker.incarnation, what=what
    )


def standing_reports(state: NodeState) -> list[types.WorkerReport]:
    """Return the reports to repeat in a new session, since they may be lost with the last one:
    failures, losses, measurements, layers received, checkpoints, evaluations, and exits that no
    plan has answered yet."""
    failed = [
        slot.failed
        for slot in state.slots
        if slot.failed is not None and slot.failed.incarnation not in state.workers
    ]
    ends = [
        report_of(worker, what)
        for slot in state.slots
        for worker, end in slot.ends
        for what in (worker.hung, end)
        if what is not None
    ]
    words = [
        report_of(worker, what)
        for worker in (*failed, *state.workers.values())
        for what in (
            worker.failure,
            worker.hung,
            worker.received,
            worker.peer_lost,
            *worker.measured,
            *worker.checkpoints,
            *worker.evaluated,
        )
        if what is not None
    ]
    return [*words, *ends]


def status_of(state: NodeState) -> types.NodeStatus:
    desired = state.desired
    sick, concern = state.health.summary()
    bare = types.NodeStatus(
        leaving=state.leave_at is not None,
        ending=state.shutting_down,
        trouble=state.trouble(),
        failed_starts=state.warm.failed_starts,
        sick=sick,
        concern=concern,
    )
    if desired.job_id is None:
        return bare
    return msgspec.structs.replace(
        bare,
        job_id=desired.job_id,
        generation=desired.generation,
        workers=tuple(_worker_status(state, worker) for worker in state.serving()),
    )


def _worker_status(state: NodeState, worker: WorkerState) -> types.WorkerStatus:
    own = [each.pid for each in state.workers.values() if each.pid is not None]
    return types.WorkerStatus(
        slot=worker.slot,
        incarnation=worker.incarnation,
        pid=worker.pid or 0,
        card=worker.card,
        data=worker.data,
        generation=worker.entered,
        also_entered=worker.also_entered,
        committed_step=-1 if worker.committed_step is None else worker.committed_step,
        stepped=worker.stepped,
        finished=worker.finished,
        peak_memory_bytes=worker.memory.peak_bytes if worker.memory else 0,
        base_memory_bytes=worker.memory.base_bytes if worker.memory else 0,
        compute_steps=worker.compute.steps if worker.compute else 0,
        compute_s=worker.compute.seconds if worker.compute else 0.0,
        beats=worker.alive.beats if worker.alive else 0,
        doing=worker.alive.doing if worker.alive else "",
        waiting=worker.alive is not None and worker.alive.waiting,
        hindrance=state.health.hindrance(worker.slot, own),
        up_s=worker.up_s,
    )


def newest_plan(
    known: types.Assignment | None, received: types.Assignment
) -> types.Assignment | None:
    """Return the assignment whose plan the agent reports as its own; None: there is none. Keep
    `known` if `received` has an older plan, as from a master whose journal lost its end."""
    if received.job_id is None:
        return None
    if known is not None and known.job_id != received.job_id:
        known = None
    if received.assign is None or (known is not None and received.generation < known.generation):
        return known
    return msgspec.structs.replace(received, job=None)


def records_hold_s(state: NodeState) -> float:
    """Return how long this node's agent delays the records of steps."""
    assign = state.desired.assign
    if assign is None or state.node not in assign.plan.nodes:
        return HOLD_S
    return hold_s(assign.plan, state.node)


def hold_s(plan: Plan, node: NodeName) -> float:
    """Return the delay for a node of the plan; 0 for the first two."""
    place = list(dict.fromkeys(worker.node for worker in plan.workers)).index(node)
    return 0.0 if place < 2 else min(MOST_HOLD_S, HOLD_S + NEXT_S * (place - 2))

"""Detection of hung workers: processes that do not answer, training threads without progress.

The agent asks every worker for a heartbeat; a thread of the worker's own answers with what the
training thread is doing (`Alive`). A worker that waits for others is not blamed: the agent of the
worker that hangs finds that one. So each hang is found on its own node, without word from others:

1. A process that does not answer is stopped, or all of it hangs.
2. A training thread that is busy with one thing for too long, and does not wait for another
   process, hangs. The limit follows from the steps that this node has seen. It is longer for
   reading and writing files, and for a process's first step, in which libraries compile.
3. A worker that was told to leave its generation has no reason to wait for another one.

A worker that hangs is killed, and counts as lost like any other. Only if it alone has a part of the
model, its limit is at least the job's own (`fruitless_s`): a stopped process may go on. Pure: times
are arguments; an agent that was paused itself has moved all of them on (`Paused`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from oobleck.agent.state import NodeState
from oobleck.agent.worker import NO_GENERATION, WorkerState
from oobleck.core.errors import LayerLost
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import require_holders
from oobleck.host.detection import Detection, patience_s

#: What the kernel says of a process that a signal has stopped, or a debugger holds.
STOPPED, TRACED, IN_KERNEL = "T", "t", "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Suspicion that a worker hangs, which holds if nothing changes until `due`."""

    since: float
    due: float
    reason: str

    @property
    def stacks_due(self) -> float:
        """Time at which the stacks of its threads are to be written down."""
        return self.since + 0.75 * (self.due - self.since)


def worst_doubt(state: NodeState, worker: WorkerState) -> Doubt | None:
    """Return the doubt about the worker that is due first; None if there is none."""
    return min(_doubts(state, worker), key=lambda doubt: doubt.due, default=None)


def _doubts(state: NodeState, worker: WorkerState) -> Iterator[Doubt]:
    if not worker.card or worker.heard_at is None:
        return  # how long it may take to get ready is told elsewhere
    detection, usual_s = state.detection, max(state.step_seconds, default=0.0)
    least_s = detection.fruitless_s if _is_irreplaceable(state, worker) else 0.0
    limit_s = detection.storage_s if worker.kernel == IN_KERNEL else detection.hang_s
    limit_s = max(limit_s, least_s)
    yield _doubt(worker.heard_at, limit_s, _silence(worker))
    alive = worker.alive
    if alive is None or worker.moved_at is None:
        return
    limit_s = max(_limit_s(detection, worker, usual_s), least_s)
    if not alive.waiting:
        yield _doubt(worker.moved_at, limit_s, f"its training thread hangs ({alive.doing})")
    if worker.told_at is not None:
        what = f"did not leave its generation when it was told to ({alive.doing})"
        yield _doubt(worker.told_at, limit_s, what)


def _doubt(since: float, limit_s: float, what: str) -> Doubt:
    return Doubt(since=since, due=since + limit_s, reason=f"{what} for {limit_s:.0f} s")


def _silence(worker: WorkerState) -> str:
    if worker.kernel in (STOPPED, TRACED):
        held = "a signal has stopped it" if worker.kernel == STOPPED else "a debugger holds it"
        return f"the process does not run: {held},"
    return "the process does not answer"


def _is_irreplaceable(state: NodeState, worker: WorkerState) -> bool:
    """Return whether training would end with this worker: no other has its part of the model, nor
    does the disk."""
    desired = state.desired
    if worker.entered == NO_GENERATION:
        return False  # it has nothing yet
    if desired.assign is None or desired.job is None or desired.job.checkpoint is not None:
        return False
    return _alone_has(desired.assign.plan, WorkerId(state.node, worker.slot))


@lru_cache(maxsize=64)
def _alone_has(plan: Plan, worker: WorkerId) -> bool:
    others = {member: held for member, held in plan.shards.items() if member != worker}
    try:
        require_holders(others, plan.layer_count)
    except LayerLost:
        return True
    return False


def _limit_s(detection: Detection, worker: WorkerState, usual_s: float) -> float:
    """Return how long the training thread may be busy with one thing."""
    assert worker.alive is not None, "asked once it has said what that is"
    limit_s = patience_s(detection.hang_s, usual_s)
    if worker.alive.files:
        limit_s = max(limit_s, detection.storage_s)
    if not worker.stepped:
        limit_s = max(limit_s, detection.first_step_s)
    return limit_s

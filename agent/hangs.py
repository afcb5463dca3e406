"""Which workers hang: processes that do not answer, and training threads that do not get on.

The agent asks every worker for a sign of life; a thread of the worker's own answers and tells what
the training thread is at (`Alive`). A worker that waits for others is not to blame, whoever it is
that they wait for: its own agent finds that one out. So without any word from elsewhere each hang
is told where it is:

1. A process that does not answer is stopped, or all of it hangs.
2. A training thread that is at the same thing for long, and does not wait for another process,
   hangs. How long is long follows from the steps that this node has seen. Longer may take what
   reads and writes files, and a process's first step, in which libraries compile.
3. A worker that was told to leave its generation waits for nobody any more.

What hangs is killed, and is a lost worker like any other. Only where it alone has a part of the
model, it is given as long as the job has: a process that was stopped may go on. Pure: times are
arguments; an agent that was paused itself has moved all of them on (`Paused`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from oobleck.agent.state import NodeState
from oobleck.agent.worker import NO_GENERATION, WorkerState
from oobleck.host.detection import Detection, patience_s
from oobleck.planner.errors import LayerLost
from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.shards import require_holders

#: What the kernel says of a process that a signal has stopped, or a debugger holds.
STOPPED, TRACED, IN_KERNEL = "T", "t", "D"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A worker hangs, if nothing changes until `due`."""

    since: float
    due: float
    reason: str

    @property
    def stacks_due(self) -> float:
        """When what its threads are at is to be written down."""
        return self.since + 0.75 * (self.due - self.since)


def worst_doubt(state: NodeState, worker: WorkerState) -> Doubt | None:
    """What speaks against the worker, and is or would be due first."""
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
    """Whether the training would end with it: it alone has a part of the model, on disk too."""
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
    """How long the training thread may be at one thing."""
    assert worker.alive is not None, "asked once it has said what that is"
    limit_s = patience_s(detection.hang_s, usual_s)
    if worker.alive.files:
        limit_s = max(limit_s, detection.storage_s)
    if not worker.stepped:
        limit_s = max(limit_s, detection.first_step_s)
    return limit_s

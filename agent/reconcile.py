"""Decision on the difference between the desired and the observed state.

Pure and level-triggered: an action whose effect has been noted (as an event) is not decided again.

Hung workers are found here too, by the answers of a thread of their own to the agent's questions
(`Alive`). A worker that waits for others is not blamed: the agent of the hung one finds it.

1. A process that does not answer is stopped, or hangs as a whole.
2. A training thread that does one thing for too long without waiting for another process hangs. The
   limit follows from the steps that this node has seen, and is longer for files and for a process's
   first step.
3. A worker that was ordered to leave its generation, and does not, hangs even if it waits for
   others.

A worker that hangs is killed. The limit for one that alone has a part of the model is at least the
job's own (`fruitless_s`), since a stopped process may resume. After a pause of the agent itself all
start times are moved on (`Paused`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from msgspec.structs import replace

from oobleck.agent import events
from oobleck.agent.state import NodeState
from oobleck.agent.worker import NO_GENERATION, WorkerState
from oobleck.core.ids import WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, Measure, Save, Stop
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost, require_holders
from oobleck.host.detection import Detection, patience_s

#: The kernel's letters for a process that a signal has stopped, that a debugger holds, or that
#: waits in the kernel.
STOPPED, TRACED, IN_KERNEL = "T", "t", "D"
#: From Stop to SIGKILL.
STOP_GRACE_S = 2.0
#: From a closed channel to SIGKILL, for a worker that does not end by itself.
CLOSED_GRACE_S = 1.0
#: A warm process answers a fork in milliseconds. The first one of a job whose model needs further
#: libraries takes seconds, or many on a busy machine. After this time it is stuck.
FORK_TIMEOUT_S = 60.0
#: Importing the libraries on a slow, busy machine.
WARM_TIMEOUT_S = 180.0
#: From the request for a fork, or from when the job's code is there, to Ready (it opens the data
#: and listens). A worker knows the limit, and reports before it what its user's code is doing.
READY_TIMEOUT_S = 120.0
#: The same for a job whose layers are compiled first.
COMPILED_TIMEOUT_S = 1800.0


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
        return  # READY_TIMEOUT_S limits the start-up
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
    if worker.abort_sent_at is not None:
        what = f"did not leave its generation when it was told to ({alive.doing})"
        yield _doubt(worker.abort_sent_at, limit_s, what)


def _doubt(since: float, limit_s: float, what: str) -> Doubt:
    return Doubt(since=since, due=since + limit_s, reason=f"{what} for {limit_s:.0f} s")


def _silence(worker: WorkerState) -> str:
    if worker.kernel in (STOPPED, TRACED):
        held = "a signal has stopped it" if worker.kernel == STOPPED else "a debugger holds it"
        return f"the process does not run: {held},"
    return "the process does not answer"


def _is_irreplaceable(state: NodeState, worker: WorkerState) -> bool:
    """Return whether training would end with this worker, whose layers nobody else has."""
    desired = state.desired
    if worker.entered == NO_GENERATION:
        return False  # it holds no layers yet
    if desired.assign is None or desired.job is None or desired.job.checkpoint is not None:
        return False
    return _is_only_holder(desired.assign.plan, WorkerId(state.node, worker.slot))


@lru_cache(maxsize=64)
def _is_only_holder(plan: Plan, worker: WorkerId) -> bool:
    others = {member: held for member, held in plan.shards.items() if member != worker}
    try:
        require_holders(others, plan.layer_count)
    except LayerLost:
        return True
    return False


def _limit_s(detection: Detection, worker: WorkerState, usual_s: float) -> float:
    """Return how long the training thread may be busy with one thing."""
    assert worker.alive is not None, "only called after its first heartbeat"
    limit_s = patience_s(detection.hang_s, usual_s)
    if worker.alive.files:
        limit_s = max(limit_s, detection.storage_s)
    if not worker.stepped:
        limit_s = max(limit_s, detection.first_step_s)
    return limit_s


@dataclass(slots=True)
class Agenda:
    """Actions to take now, and when to decide again."""

    now: float
    actions: list[events.Action] = field(default_factory=list)
    #: Earliest time at which an action is due; None: no action is planned.
    wake_at: float | None = None
    #: All processes are gone and the agent may end.
    done: bool = False

    def add(self, action: events.Action, due: float | None = None) -> None:
        """Add an action, or set the wake-up for it if it is due later; None: it is due now."""
        if due is None or due <= self.now:
            self.actions.append(action)
        elif self.wake_at is None or due < self.wake_at:
            self.wake_at = due


def decide(state: NodeState, now: float) -> Agenda:
    """Return the actions that are due, and when the next one will be."""
    agenda = Agenda(now)
    if not state.shutting_down:
        _leave(state, agenda)
    _warm(state, agenda)
    for worker in state.workers.values():
        _worker(state, worker, agenda)
    if not state.shutting_down and state.warm.ready:
        _fork(state, agenda)
    agenda.done = state.shutting_down and not state.workers and state.warm.started_at is None
    return agenda


def _fork(state: NodeState, agenda: Agenda) -> None:
    """Fork a worker for every slot that is empty and has none that failed for good."""
    desired = state.desired
    if desired.job_id is None or desired.job is None:
        return
    for number, slot in enumerate(state.slots):
        if state.current(number) is None and slot.failure is None:
            fork = events.ForkWorker(
                slot=number,
                job_id=desired.job_id,
                job=desired.job,
                passed=slot.passed,
                ready_by=agenda.now + _ready_s(desired.job),
                replaced=slot.replaced,
                faults=state.faults_for(number),
                silence_s=state.detection.silence_s,
            )
            agenda.add(fork, slot.budget.not_before)


def _leave(state: NodeState, agenda: Agenda) -> None:
    """End an agent that was asked to, once its work has moved to other nodes, or cannot move."""
    if state.leave_at is None or state.leave_by is None:
        return
    no_session_since = state.no_session_since
    if state.desired.drained and state.desired.job_id is None:
        agenda.add(events.End(reason="the node is drained"))
    elif no_session_since is None:
        agenda.add(events.End(reason="the time for the drain is over"), state.leave_by)
    elif not state.has_heirs():
        reason = "no master is there, and no other node that trains with this one"
        agenda.add(events.End(reason=reason))
    else:
        answer_s = state.detection.answer_s
        due = min(max(state.leave_at, no_session_since) + answer_s, state.leave_by)
        reason = f"no master has been there for {answer_s:g} s to move the work"
        agenda.add(events.End(reason=reason), due)


def _warm(state: NodeState, agenda: Agenda) -> None:
    warm = state.warm
    if warm.started_at is None:
        if not state.shutting_down:
            agenda.add(events.StartWarm(), warm.budget.not_before)
        return
    if warm.killed:
        return
    if state.shutting_down and not state.workers:
        agenda.add(events.KillWarm(reason="the agent ends"))
    elif not warm.ready:
        agenda.add(
            events.KillWarm(reason=f"not ready after {WARM_TIMEOUT_S:.0f} s"),
            warm.started_at + WARM_TIMEOUT_S,
        )
    unanswered = [worker.asked_at for worker in state.workers.values() if worker.pid is None]
    if unanswered:
        reason = f"no answer to a fork for {FORK_TIMEOUT_S:.0f} s"
        agenda.add(events.KillWarm(reason=reason), min(unanswered) + FORK_TIMEOUT_S)


def _worker(state: NodeState, worker: WorkerState, agenda: Agenda) -> None:
    if worker.killed or worker.pid is None:
        return
    ready_s = _ready_s(state.desired.job)
    for since, grace_s, what in (
        (worker.closed_at, CLOSED_GRACE_S, "its channel closed"),
        (worker.failed_at, STOP_GRACE_S, "it reported a failure"),
        (worker.stop_sent_at, STOP_GRACE_S, "it was told to stop"),
        (None if worker.card else worker.starts_at, ready_s, "it was forked, not ready"),
    ):
        if since is not None:
            kill = events.KillWorker(
                incarnation=worker.incarnation, reason=f"still there {grace_s:.0f} s after {what}"
            )
            agenda.add(kill, since + grace_s)
    if worker.stop_sent_at is not None:
        return
    _check_liveness(state, worker, agenda)
    if (reason := _stop_reason(state, worker)) is not None:
        agenda.add(events.Send(incarnation=worker.incarnation, message=Stop(reason=reason)))
        return
    assign, wish, number = state.desired.assign, state.desired.measure, state.desired.save
    if assign is not None and _is_to_be_sent(state, assign, worker):
        agenda.add(events.Send(incarnation=worker.incarnation, message=assign))
    if wish is not None and wish.alone:
        _measure_alone(state, wish, worker, agenda)
    elif wish is not None and _can_measure(wish, worker):
        agenda.add(events.Send(incarnation=worker.incarnation, message=wish))
    if worker.sent > NO_GENERATION and worker.closed_at is None and worker.save_sent < number:
        agenda.add(events.Send(incarnation=worker.incarnation, message=Save(number=number)))
    acknowledged = state.acknowledged
    up = worker.card and worker.closed_at is None
    if acknowledged is not None and up and worker.acknowledged != acknowledged:
        agenda.add(events.Send(incarnation=worker.incarnation, message=acknowledged))


def _ready_s(job: JobSpec | None) -> float:
    return COMPILED_TIMEOUT_S if job is not None and job.training.compile else READY_TIMEOUT_S


def _check_liveness(state: NodeState, worker: WorkerState, agenda: Agenda) -> None:
    if not worker.card or worker.closed_at is not None or worker.failed_at is not None:
        return
    if (doubt := worst_doubt(state, worker)) is not None:
        give_up = events.GiveUpWorker(
            incarnation=worker.incarnation, since=doubt.since, reason=doubt.reason
        )
        agenda.add(give_up, doubt.due)
        if worker.stacks_since != doubt.since:
            stacks = events.WriteStacks(incarnation=worker.incarnation, since=doubt.since)
            agenda.add(stacks, doubt.stacks_due)
    asked_at, heard_at = worker.asked_alive_at, worker.heard_at
    look = asked_at is not None and heard_at is not None and heard_at < asked_at
    due = None if asked_at is None else asked_at + state.detection.heartbeat_s
    agenda.add(events.RequestHeartbeat(incarnation=worker.incarnation, look=look), due)


def _stop_reason(state: NodeState, worker: WorkerState) -> str | None:
    if state.shutting_down:
        return "the agent ends"
    if state.desired.job_id is None:
        return "the job is over"
    if state.desired.job_id != worker.job_id:
        return "another job begins"
    return None


def _is_to_be_sent(state: NodeState, assign: Assign, worker: WorkerState) -> bool:
    """Return whether the plan has exactly this process, which was sent neither it nor a newer one.
    Do not send it to a process with other data: its rendezvous would fail for all, and the master
    leaves that process out of the next plan."""
    incarnations = state.desired.worker_incarnations
    return (
        worker.closed_at is None
        and worker.card != ""
        and assign.data in ("", worker.data)
        and worker.sent < assign.plan.generation
        and worker.slot < len(incarnations)
        and incarnations[worker.slot] == worker.incarnation
        and WorkerId(state.node, worker.slot) in (*assign.plan.workers, *assign.leaving)
    )


def _measure_alone(state: NodeState, wish: Measure, worker: WorkerState, agenda: Agenda) -> None:
    """Ask a stand-by worker to measure every `stand_by_s`. The first time is that long after it
    began to stand by, since training has measured it until then."""
    since, asked_at = state.standing_by_since, worker.measure_sent_at
    if since is None or worker.closed_at is not None or not worker.card:
        return
    if asked_at is not None and not worker.measured:
        return
    again = replace(wish, attempt=worker.measure_sent + 1)
    due = max(since, asked_at or since) + state.detection.stand_by_s
    agenda.add(events.Send(incarnation=worker.incarnation, message=again), due)


def _can_measure(wish: Measure, worker: WorkerState) -> bool:
    """Return whether the worker is up without a plan, and was not asked for this attempt yet."""
    return (
        worker.closed_at is None
        and worker.card != ""
        and worker.sent == NO_GENERATION
        and worker.measure_sent < wish.attempt
    )

"""What the agent observes of its processes and what the master wants of it, and how events
change that.

`NodeState` has one owner, the supervisor, which applies events to it in the order they come.
`oobleck.agent.reconcile` decides from it. Must not know sockets, processes, gRPC or the clock:
the time comes with each event.

A worker process goes through: fork asked of the warm process -> its channel is open and Launch
is sent -> Forked (it has a pid) -> Ready (it serves its store) -> plans, one per generation ->
gone. Desired and observed are separate: only `Assigned` and `ShutDown` change what is desired,
all other events tell what was seen or done.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from oobleck.agent.backoff import StartBudget
from oobleck.host.detection import Detection
from oobleck.host.messages import (
    Alive,
    CheckpointSaved,
    Committed,
    Evaluated,
    Failed,
    FaultRule,
    Finished,
    FromWorker,
    LinkMeasured,
    Measure,
    Measured,
    MemoryUse,
    PeerLost,
    PhaseReached,
    Ready,
    Recorded,
    Rendezvous,
    Restored,
    SaveFailed,
)
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.plan import Plan
from oobleck.proto.types import Hung

NO_GENERATION = Generation(0)

#: Evaluations of a worker that a new session of the master is told of.
KEPT_EVALUATIONS = 256
#: For an agent without workers: from SIGTERM to its end, if the master does not answer.
IDLE_GRACE_S = 2.0
#: Steps that tell how long one takes: of so many the longest is the 99th percentile.
KNOWN_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPart:
    """A plan, where its workers meet, and the processes that it counts on here (by slot)."""

    plan: Plan
    rendezvous: Rendezvous
    boundary: bool
    worker_incarnations: tuple[Incarnation, ...]
    #: See `Assign`.
    restore: bool = False
    leaving: tuple[WorkerId, ...] = ()
    handover: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The job that every slot shall have a worker for, and the plan to hand to them."""

    job_id: JobId
    job: JobSpec
    #: None: have the workers ready, and wait.
    part: PlanPart | None
    #: While they wait for their first plan: what they shall measure.
    measure: Measure | None = None
    #: Number of the newest wish for a checkpoint; 0: none.
    save: int = 0


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The master's word; None: no job."""

    desired: Desired | None
    #: The node is drained.
    drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The agent is to end as soon as the node is drained, at the latest after the time."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionTold:
    """The time-outs that the master goes by."""

    detection: Detection


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """This agent did not run for so long: nobody is to blame for what did not come meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutDown:
    """The agent is to end: all workers are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStarted:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReady:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmKilled:
    """SIGKILL was sent; `WarmExited` is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmExited:
    """The warm process is gone, and its workers with it (their own exits come separately)."""

    #: Its end, and its last words.
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAsked:
    slot: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForked:
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSent:
    incarnation: Incarnation
    generation: Generation
    boundary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSent:
    incarnation: Incarnation
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSent:
    incarnation: Incarnation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whether it is alive; `kernel`: the state that the kernel says it is in."""

    incarnation: Incarnation
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksAsked:
    """It was told to write where its threads are, since it is at the same thing since `since`."""

    incarnation: Incarnation
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSent:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKilled:
    """SIGKILL was sent; the exit is still to come."""

    incarnation: Incarnation
    #: Where it was killed because of that.
    hung: Hung | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    incarnation: Incarnation
    message: FromWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelClosed:
    """The worker's end is closed, or what came on it made no sense."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    incarnation: Incarnation


Event = (
    Assigned
    | DetectionTold
    | Leave
    | Paused
    | ShutDown
    | WarmStarted
    | WarmReady
    | WarmKilled
    | WarmExited
    | ForkAsked
    | WorkerForked
    | PlanSent
    | MeasureSent
    | SaveSent
    | Asked
    | StacksAsked
    | StopSent
    | WorkerKilled
    | WorkerSaid
    | ChannelClosed
    | WorkerExited
)


# ---- state


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process as seen from outside."""

    slot: int
    incarnation: Incarnation
    job_id: JobId
    asked_at: float
    pid: int | None = None
    #: Empty until the worker is ready.
    store: str = ""
    #: Fingerprint of the data that it reads; with `store`.
    data: str = ""
    #: Newest generation handed to it.
    sent: Generation = NO_GENERATION
    #: Newest generation that it has entered, its transfers done.
    entered: Generation = NO_GENERATION
    committed_step: int | None = None
    memory: MemoryUse | None = None
    finished: bool = False
    #: Newest attempt at a measurement that was handed to it, and what came of it; until its plan.
    measure_sent: int = 0
    measured: tuple[Measured | LinkMeasured, ...] = ()
    #: Number of the newest wish for a checkpoint that was handed to it.
    save_sent: int = 0
    #: The last of each kind that it said of checkpoints.
    checkpoints: tuple[CheckpointSaved | SaveFailed | Restored, ...] = ()
    #: The last ones, oldest first: the master may be away while they are made.
    evaluated: deque[Evaluated] = field(default_factory=lambda: deque(maxlen=KEPT_EVALUATIONS))
    failure: Failed | None = None
    failed_at: float | None = None
    #: What it lost; None again as soon as it has a newer plan.
    peer_lost: PeerLost | None = None
    #: When it was last asked for a sign of life, and last gave one; with what it then said, and
    #: since when it says that.
    asked_alive_at: float | None = None
    heard_at: float | None = None
    alive: Alive | None = None
    moved_at: float | None = None
    #: A letter of the kernel's for its state; empty: not looked.
    kernel: str = ""
    #: Since when it is to leave its generation; None: it has.
    told_at: float | None = None
    #: What it was last made to write its stacks for.
    stacks_since: float | None = None
    #: It has committed a step.
    stepped: bool = False
    #: Why it was taken for one that hangs.
    hung: Hung | None = None
    stop_sent_at: float | None = None
    closed_at: float | None = None
    killed: bool = False


@dataclass(slots=True)
class Slot:
    """What outlives the worker processes of one slot, for the current job."""

    budget: StartBudget = field(default_factory=StartBudget)
    #: The worker that said that no retry helps; the slot stays empty until the job changes.
    failed: Worker | None = None
    launches: int = 0

    @property
    def failure(self) -> Failed | None:
        return self.failed.failure if self.failed is not None else None


@dataclass(slots=True)
class WarmState:
    """The process that workers are forked from."""

    started_at: float | None = None
    ready: bool = False
    killed: bool = False
    budget: StartBudget = field(default_factory=StartBudget)
    #: Ends in a row before it was ready, and how the last one came.
    failed_starts: int = 0
    last_end: str = ""


@dataclass(slots=True, kw_only=True)
class NodeState:
    node: NodeName
    slot_count: int
    #: Faults of a drill, for the workers of this node.
    faults: Sequence[FaultRule] = ()
    desired: Desired | None = None
    #: Until a master tells, those that most have.
    detection: Detection = field(default_factory=Detection)
    #: The node is drained, by the master's last word.
    drained: bool = False
    #: When the agent ends at the latest; None: it was not told to.
    leave_by: float | None = None
    shutting_down: bool = False
    warm: WarmState = field(default_factory=WarmState)
    slots: list[Slot] = field(init=False)
    #: Of the job's last committed steps.
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KNOWN_STEPS))
    #: The newest of them.
    timed_step: int = 0
    workers: dict[Incarnation, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range(self.slot_count)]

    def current(self, slot: int) -> Worker | None:
        """The process that fills `slot`, whichever job it belongs to."""
        return next((w for w in self.workers.values() if w.slot == slot), None)

    def trouble(self) -> str:
        """Why no worker can be started here; empty: one can."""
        if self.warm.failed_starts:
            times = "once" if self.warm.failed_starts == 1 else f"{self.warm.failed_starts} times"
            return (
                f"what workers are forked from has ended {times} before it was ready; the last "
                f"time: {self.warm.last_end}"
            )
        failures = (slot.failure.message for slot in self.slots if slot.failure is not None)
        return next(failures, "")

    def serving(self) -> list[Worker]:
        """The workers of the desired job that are not on their way out, by slot."""
        if self.desired is None or self.shutting_down:
            return []
        job_id = self.desired.job_id
        here = [w for w in self.workers.values() if w.job_id == job_id and w.stop_sent_at is None]
        return sorted(here, key=lambda worker: worker.slot)

    def faults_for(self, slot: int) -> tuple[FaultRule, ...]:
        """The scripted faults that the next worker of `slot` shall have.

        A replacement gets none: it does the step of its predecessor's end again, and the fault
        that caused that end must not strike it too.
        """
        if self.slots[slot].launches:
            return ()
        mine = WorkerId(self.node, slot)
        return tuple(rule for rule in self.faults if rule.worker == mine)

    def apply(self, event: Event, now: float) -> None:
        """Take note of `event`; events about processes that are gone change nothing."""
        match event:
            case Assigned(desired=desired, drained=drained):
                self._assign(desired)
                self.drained = drained
            case DetectionTold(detection=detection):
                self.detection = detection
            case Leave(grace_s=grace_s):
                # Without work only the master's answer is waited for.
                self.leave_by = now + (grace_s if self.workers else min(grace_s, IDLE_GRACE_S))
            case Paused(seconds=seconds):
                for each in self.workers.values():
                    _excuse(each, seconds, now)
            case ShutDown():
                self.shutting_down = True
            case WarmStarted():
                self.warm.started_at = now
            case WarmReady():
                self.warm.ready, self.warm.failed_starts = True, 0
            case WarmKilled():
                self.warm.killed = True
            case WarmExited(how=how):
                if self.warm.started_at is not None:
                    self.warm.budget.ended(started_at=self.warm.started_at, now=now)
                failed = 0 if self.warm.ready else self.warm.failed_starts + 1
                self.warm = WarmState(budget=self.warm.budget, failed_starts=failed, last_end=how)
            case ForkAsked(slot=slot, incarnation=incarnation):
                assert self.desired is not None
                self.slots[slot].launches += 1
                self.workers[incarnation] = Worker(
                    slot=slot, incarnation=incarnation, job_id=self.desired.job_id, asked_at=now
                )
            case _:
                if (worker := self.workers.get(event.incarnation)) is not None:
                    self._about_worker(worker, event, now)

    def _assign(self, desired: Desired | None) -> None:
        before = self.desired.job_id if self.desired else None
        after = desired.job_id if desired else None
        if before != after:
            self.slots = [Slot() for _ in range(self.slot_count)]
            self.step_seconds.clear()
            self.timed_step = 0
        self.desired = desired

    def _about_worker(
        self,
        worker: Worker,
        event: WorkerForked
        | PlanSent
        | MeasureSent
        | SaveSent
        | Asked
        | StacksAsked
        | StopSent
        | WorkerKilled
        | WorkerSaid
        | ChannelClosed
        | WorkerExited,
        now: float,
    ) -> None:
        match event:
            case WorkerForked(pid=pid):
                worker.pid = pid
            case PlanSent(generation=generation, boundary=boundary):
                worker.sent, worker.peer_lost = generation, None
                if not boundary:
                    worker.told_at = now
                worker.measured = ()
            case MeasureSent(attempt=attempt):
                worker.measure_sent, worker.measured = attempt, ()
            case SaveSent(number=number):
                worker.save_sent = number
            case Asked(kernel=kernel):
                worker.asked_alive_at, worker.kernel = now, kernel
            case StacksAsked(since=since):
                worker.stacks_since = since
            case StopSent():
                worker.stop_sent_at = now
            case WorkerKilled(hung=hung):
                worker.killed, worker.hung = True, hung
            case ChannelClosed():
                worker.closed_at = now
            case WorkerSaid(message=message):
                self._worker_said(worker, message, now)
            case WorkerExited():
                del self.workers[worker.incarnation]
                if worker.stop_sent_at is None and self._is_current_job(worker):
                    self.slots[worker.slot].budget.ended(started_at=worker.asked_at, now=now)

    def _is_current_job(self, worker: Worker) -> bool:
        return self.desired is not None and self.desired.job_id == worker.job_id

    def _worker_said(self, worker: Worker, message: FromWorker, now: float) -> None:
        match message:
            case Ready(store=store, data=data):
                worker.store, worker.data = store, data
                worker.heard_at = now
            case Alive():
                worker.heard_at = now
                if message != worker.alive:
                    worker.alive, worker.moved_at = message, now
            case PhaseReached(phase="aborted", generation=generation):
                if generation >= worker.sent:
                    worker.told_at = None
            case PhaseReached(phase="transferred", generation=generation):
                # A loss at the very end starts a generation for what is still to be saved.
                worker.entered, worker.finished = generation, False
            case PhaseReached(committed_step=int(step)):
                worker.committed_step = step
            case Committed(record=record, memory=memory):
                # A process's first step says nothing of the others.
                if worker.stepped and record.step > self.timed_step:
                    self.timed_step = record.step
                    self.step_seconds.append(record.step_seconds)
                worker.committed_step, worker.stepped = record.step, True
                worker.memory = memory or worker.memory
            case Evaluated():
                worker.evaluated.append(message)
            case Failed():
                worker.failure, worker.failed_at = message, now
                if self._is_current_job(worker):
                    self.slots[worker.slot].failed = worker
            case Finished(step=step):
                worker.finished = True
                worker.committed_step = step
            case PeerLost():
                worker.peer_lost = message
            case Measured() | LinkMeasured():
                worker.measured = (*worker.measured, message)
            case CheckpointSaved() | SaveFailed() | Restored():
                kept = (m for m in worker.checkpoints if type(m) is not type(message))
                worker.checkpoints = (*kept, message)
            case PhaseReached() | Recorded():
                pass  # for the master; nothing changes here


def _excuse(worker: Worker, seconds: float, now: float) -> None:
    """Nothing could be heard of it for so long."""
    if worker.heard_at is not None:
        worker.heard_at = min(now, worker.heard_at + seconds)
    if worker.moved_at is not None:
        worker.moved_at = min(now, worker.moved_at + seconds)
    if worker.told_at is not None:
        worker.told_at = min(now, worker.told_at + seconds)

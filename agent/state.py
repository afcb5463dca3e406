"""State of a node: the processes that the agent observes, and what the master wants of them.

`NodeState` has one owner, the supervisor, which applies events to it in the order they arrive.
`oobleck.agent.reconcile` decides from it. Must not know sockets, processes, gRPC or the clock: the
time is in each event.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from oobleck.agent import events
from oobleck.agent.gpus import GpuHealth
from oobleck.agent.worker import WorkerState
from oobleck.core.ids import Incarnation, NodeName, WorkerId
from oobleck.core.messages import Acknowledged, Committed, Failed, FaultRule, Ready
from oobleck.host.detection import Detection
from oobleck.proto import types

#: A process that lives shorter than this counts as one that ends quickly.
QUICK_S = 10.0
#: Quick ends in a row from which on the next start waits.
FREE_STARTS = 3
LONGEST_S = 30.0
#: For an agent without workers: from SIGTERM to its end, if the master does not answer.
IDLE_GRACE_S = 2.0
#: Ends of a slot's processes that are reported to a new session of the master.
KEPT_ENDS = 2
NOTHING = types.Assignment(version=0)
#: Steps that measure how long one takes: the longest of so many is the 99th percentile.
KNOWN_STEPS = 100


@dataclass(slots=True)
class StartBudget:
    """Back-off of a process: free starts first, then a wait that doubles up to half a minute."""

    quick_ends: int = 0
    not_before: float = 0.0

    def ended(self, *, started_at: float, now: float) -> float:
        """Note an end, and return the seconds until the next start."""
        self.quick_ends = self.quick_ends + 1 if now - started_at < QUICK_S else 0
        excess = self.quick_ends - FREE_STARTS
        wait_s = min(LONGEST_S, 2.0**excess) if excess >= 0 else 0.0
        self.not_before = now + wait_s
        return wait_s


@dataclass(slots=True)
class Slot:
    """State of one slot that outlives its worker processes, for the current job."""

    #: The last processes that ended by themselves, and how. Emptied when one of the slot commits a
    #: step: by then a plan has answered their ends.
    ends: deque[tuple[WorkerState, types.WorkerExited]] = field(
        default_factory=lambda: deque(maxlen=KEPT_ENDS)
    )
    #: When the next process may be started.
    budget: StartBudget = field(default_factory=StartBudget)
    #: The worker that reported a permanent failure; the slot stays empty until the job changes.
    failed: WorkerState | None = None
    #: Number of processes asked for, whether any was ready, and whether any has asked for a
    #: replacement.
    launches: int = 0
    passed: bool = False
    replaced: bool = False

    @property
    def failure(self) -> Failed | None:
        return self.failed.failure if self.failed is not None else None


@dataclass(slots=True)
class WarmState:
    """State of the process that workers are forked from."""

    started_at: float | None = None
    ready: bool = False
    killed: bool = False
    budget: StartBudget = field(default_factory=StartBudget)
    #: Consecutive ends before it was ready, and how the last one ended.
    failed_starts: int = 0
    last_end: str = ""


@dataclass(slots=True, kw_only=True)
class NodeState:
    node: NodeName
    slot_count: int
    #: Faults of a drill, for the workers of this node.
    faults: Sequence[FaultRule] = ()
    #: Health of the workers' GPUs.
    health: GpuHealth = field(default_factory=GpuHealth)
    #: The master's newest assignment; at first there is no job.
    desired: types.Assignment = NOTHING
    #: Records of the desired job that the master has on its disk; None: unknown.
    acknowledged: Acknowledged | None = None
    #: Why a newer assignment cannot be followed; empty: there is none.
    not_understood: str = ""
    #: When its workers began to stand by; None: they do not.
    standing_by_since: float | None = None
    #: The master's time-outs; until it sends them, those that most masters have.
    detection: Detection = field(default_factory=Detection)
    #: When the last session ended; None: a master hears this agent.
    no_session_since: float | None = 0.0
    #: When the agent was asked to end, and its deadline; None: it was not asked.
    leave_at: float | None = None
    leave_by: float | None = None
    shutting_down: bool = False
    warm: WarmState = field(default_factory=WarmState)
    slots: list[Slot] = field(init=False)
    #: Durations of the job's last committed steps.
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KNOWN_STEPS))
    #: The newest timed step.
    timed_step: int = 0
    workers: dict[Incarnation, WorkerState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [Slot() for _ in range(self.slot_count)]

    def current(self, slot: int) -> WorkerState | None:
        """Return the process that fills `slot`, whichever job it belongs to."""
        return next((w for w in self.workers.values() if w.slot == slot), None)

    def trouble(self) -> str:
        """Return why no worker can be started here; empty: one can."""
        if self.not_understood:
            return f"what the master wants is not understood: {self.not_understood}"
        if self.warm.failed_starts:
            times = "once" if self.warm.failed_starts == 1 else f"{self.warm.failed_starts} times"
            return (
                f"what workers are forked from has ended {times} before it was ready; the last "
                f"time: {self.warm.last_end}"
            )
        failures = (slot.failure.message for slot in self.slots if slot.failure is not None)
        return next(failures, "")

    def has_heirs(self) -> bool:
        """Return whether other nodes train with the workers here, and could take their work."""
        assign = self.desired.assign
        others = {*assign.plan.nodes} - {self.node} if assign is not None else set()
        return bool(self.workers) and bool(others)

    def serving(self) -> list[WorkerState]:
        """Return the workers of the desired job that are not ending, by slot."""
        if self.shutting_down:
            return []
        everyone = self.workers.values()
        job_id = self.desired.job_id
        serving = [w for w in everyone if w.job_id == job_id and w.stop_sent_at is None]
        return sorted(serving, key=lambda worker: worker.slot)

    def faults_for(self, slot: int) -> tuple[FaultRule, ...]:
        """Return the scripted faults for the next worker of `slot`. A replacement gets none: it
        repeats the step at which the fault struck."""
        if self.slots[slot].launches:
            return ()
        mine = WorkerId(self.node, slot)
        return tuple(rule for rule in self.faults if rule.worker == mine)

    def apply(self, event: events.Event, now: float) -> None:
        """Apply `event`; ignore one about a process that is gone."""
        match event:
            case events.Assigned(desired=desired):
                self._assign(desired, now)
                self.not_understood = ""
            case events.RecordsStored(job_id=job_id, acknowledged=acknowledged):
                if job_id == self.desired.job_id:
                    self.acknowledged = acknowledged
            case events.NotUnderstood(reason=reason):
                self.not_understood = reason
            case events.SessionBegan():
                self.no_session_since = None
            case events.SessionOver():
                self.no_session_since = now
            case events.DetectionReceived(detection=detection):
                self.detection = detection
            case events.Leave(grace_s=grace_s):
                self.leave_at = now
                # Without workers there is only the master's answer to wait for.
                self.leave_by = now + (grace_s if self.workers else min(grace_s, IDLE_GRACE_S))
            case events.GpusRead(sample=sample):
                self.health.take(sample)
            case events.Paused(seconds=seconds):
                for each in self.workers.values():
                    each.excuse(seconds, now)
            case events.ShutDown():
                self.shutting_down = True
            case events.StartWarm():
                self.warm.started_at = now
            case events.WarmReady():
                self.warm.ready, self.warm.failed_starts = True, 0
            case events.KillWarm():
                self.warm.killed = True
            case events.WarmExited(how=how):
                if self.warm.started_at is not None:
                    self.warm.budget.ended(started_at=self.warm.started_at, now=now)
                failed = 0 if self.warm.ready else self.warm.failed_starts + 1
                self.warm = WarmState(budget=self.warm.budget, failed_starts=failed, last_end=how)
            case events.ForkRequested(slot=slot, incarnation=incarnation, fetches=fetches):
                assert self.desired.job_id is not None
                self.slots[slot].launches += 1
                self.workers[incarnation] = WorkerState(
                    slot=slot,
                    incarnation=incarnation,
                    job_id=self.desired.job_id,
                    asked_at=now,
                    starts_at=None if fetches else now,
                )
            case _:
                if (worker := self.workers.get(event.incarnation)) is not None:
                    self._about_worker(worker, event, now)

    def _assign(self, desired: types.Assignment, now: float) -> None:
        if desired.job_id != self.desired.job_id:
            self.slots = [Slot() for _ in range(self.slot_count)]
            self.step_seconds.clear()
            self.timed_step = 0
            self.acknowledged = None
        if desired.measure is None or not desired.measure.alone:
            self.standing_by_since = None
        elif self.standing_by_since is None:
            self.standing_by_since = now
        self.desired = desired

    def _about_worker(self, worker: WorkerState, event: events.WorkerEvent, now: float) -> None:
        slot, current = self.slots[worker.slot], self.desired.job_id == worker.job_id
        match event:
            case events.WorkerMessage(message=Committed(record=record)):
                slot.ends.clear()
                # A process's first step is longer than the others.
                if worker.stepped and record.step > self.timed_step:
                    self.timed_step = record.step
                    self.step_seconds.append(record.step_seconds)
            case events.WorkerMessage(message=Ready()) if current:
                slot.passed = True
            case events.WorkerMessage(message=Failed(kind="user" | "node")) if current:
                slot.failed = worker
            case events.WorkerMessage(message=Failed(kind="internal")) if current:
                slot.replaced = True
            case events.WorkerExited(end=end):
                del self.workers[worker.incarnation]
                if worker.stop_sent_at is None and current:
                    slot.budget.ended(started_at=worker.asked_at, now=now)
                    if end is not None:
                        slot.ends.append((worker, end))
            case _:
                pass  # changes only the worker
        worker.note(event, now)

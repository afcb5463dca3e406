"""State of one worker process as seen from outside, and how its messages change it.

Stages: fork requested -> channel open, Launch sent -> Forked (pid known) -> Ready (others can call
it) -> one plan per generation -> gone. Must not know other workers, nor what is desired.
"""

from collections import deque
from dataclasses import dataclass, field

from oobleck.agent import events
from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import (
    Acknowledged,
    Alive,
    Assign,
    CheckpointSaved,
    Committed,
    ComputeTime,
    Evaluated,
    Failed,
    Finished,
    FromWorker,
    Handed,
    LinkMeasured,
    Measure,
    Measured,
    MemoryUse,
    PeerLost,
    PhaseReached,
    Ready,
    Recorded,
    Restored,
    Save,
    SaveFailed,
    Stop,
)
from oobleck.proto.types import Hung

NO_GENERATION = Generation(0)
#: Evaluations of a worker that are reported to a new session of the master.
KEPT_EVALUATIONS = 256
#: Entered generations that are reported; only a fault makes more follow without a step.
KEPT_ENTERED = 16


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """Worker process as seen from outside."""

    slot: int
    incarnation: Incarnation
    job_id: JobId
    asked_at: float
    #: When its start-up time began: not before it has the job's code. None: the code is still
    #: fetched.
    starts_at: float | None
    pid: int | None = None
    #: Empty until the worker is ready.
    card: str = ""
    #: Fingerprint of the data that it reads, and the length of its start-up; with `card`.
    data: str = ""
    up_s: float = 0.0
    #: Newest generation handed to it.
    sent: Generation = NO_GENERATION
    #: Newest generation that it has entered, its transfers done.
    entered: Generation = NO_GENERATION
    #: Generations before it that it has entered since it last committed a step.
    also_entered: tuple[Generation, ...] = ()
    #: Layers that it last held on the way into a generation.
    received: PhaseReached | None = None
    committed_step: int | None = None
    memory: MemoryUse | None = None
    #: Compute time in the generation `stepped`; None: not reported, or implausible.
    compute: ComputeTime | None = None
    finished: bool = False
    #: Newest measurement attempt handed to it, and its results; until its plan.
    measure_sent: int = 0
    #: When that was sent; None: not since its plan.
    measure_sent_at: float | None = None
    measured: tuple[Measured | LinkMeasured, ...] = ()
    #: Number of the newest wish for a checkpoint that was handed to it.
    save_sent: int = 0
    #: Acknowledgement last sent to it; None: none was.
    acknowledged: Acknowledged | None = None
    #: Its last message of each kind about checkpoints.
    checkpoints: tuple[CheckpointSaved | SaveFailed | Restored, ...] = ()
    #: Its last evaluations, oldest first: the master may be away while they are made.
    evaluated: deque[Evaluated] = field(default_factory=lambda: deque(maxlen=KEPT_EVALUATIONS))
    failure: Failed | None = None
    failed_at: float | None = None
    #: The peers it lost; None again as soon as it has a newer plan.
    peer_lost: PeerLost | None = None
    #: When it was last asked for a heartbeat, when it last sent one, the last heartbeat, and since
    #: when that has been the same.
    asked_alive_at: float | None = None
    heard_at: float | None = None
    alive: Alive | None = None
    moved_at: float | None = None
    #: The kernel's letter for its state; empty: not read.
    kernel: str = ""
    #: When it was ordered to abort its generation; None: it has.
    abort_sent_at: float | None = None
    #: Start of the doubt for which it last wrote its stacks.
    stacks_since: float | None = None
    #: Newest generation that it has committed a step in.
    stepped: Generation = NO_GENERATION
    #: Why it was considered hung.
    hung: Hung | None = None
    stop_sent_at: float | None = None
    closed_at: float | None = None
    killed: bool = False

    def note(self, event: events.WorkerEvent, now: float) -> None:
        match event:
            case events.WorkerForked(pid=pid):
                self.pid = pid
            case events.CodeFetched():
                self.starts_at = now
            case events.Send(message=Assign() as assign):
                self.sent, self.peer_lost = assign.plan.generation, None
                if not assign.boundary:
                    self.abort_sent_at = now
                self.measure_sent_at, self.measured = None, ()
            case events.Send(message=Measure() as wish):
                self.measure_sent, self.measured = wish.attempt, ()
                self.measure_sent_at = now
            case events.Send(message=Save(number=number)):
                self.save_sent = number
            case events.Send(message=Acknowledged() as acknowledged):
                self.acknowledged = acknowledged
            case events.HeartbeatRequested(kernel=kernel):
                self.asked_alive_at, self.kernel = now, kernel
            case events.WriteStacks(since=since):
                self.stacks_since = since
            case events.Send(message=Stop()):
                self.stop_sent_at = now
            case events.GiveUpWorker(since=since, reason=reason):
                self.killed, self.hung = True, Hung(reason=reason, seconds=now - since)
            case events.KillWorker():
                self.killed = True
            case events.ChannelClosed():
                self.closed_at = now
            case events.WorkerMessage(message=message):
                self._note_message(message, now)
            case events.Send() | events.WorkerExited():
                pass  # nothing to note

    def _note_message(self, message: FromWorker, now: float) -> None:
        match message:
            case Ready(card=card, data=data):
                self.card, self.data = card, data
                self.up_s = now - (self.asked_at if self.starts_at is None else self.starts_at)
                self.heard_at = now
            case Alive():
                self.heard_at = now
                if message != self.alive:
                    self.alive, self.moved_at = message, now
            case PhaseReached(phase="aborted", generation=generation):
                if generation >= self.sent:
                    self.abort_sent_at = None
            case PhaseReached(phase="transferred", generation=generation):
                # `finished` may be set: a loss after the last step starts a generation that saves.
                if self.entered not in (NO_GENERATION, generation):
                    self.also_entered = (*self.also_entered, self.entered)[-KEPT_ENTERED:]
                self.entered, self.finished, self.received = generation, False, None
            case PhaseReached(phase="received"):
                self.received = message
            case PhaseReached(committed_step=int(step)):
                self.committed_step = step
            case Committed(record=record, memory=memory, compute=compute):
                self.committed_step = record.step
                self.stepped = max(self.stepped, record.generation)
                self.also_entered = tuple(g for g in self.also_entered if g >= self.stepped)
                self.memory = memory or self.memory
                self.compute = compute if compute and compute.makes_sense else None
            case Evaluated():
                self.evaluated.append(message)
            case Failed():
                self.failure, self.failed_at = message, now
            case Finished(step=step):
                self.finished = True
                self.committed_step = step
            case PeerLost():
                self.peer_lost = message
            case Measured() | LinkMeasured():
                self.measured = (*self.measured, message)
            case CheckpointSaved() | SaveFailed() | Restored():
                kept = (m for m in self.checkpoints if type(m) is not type(message))
                self.checkpoints = (*kept, message)
            case PhaseReached() | Recorded() | Handed():
                pass  # for the master; nothing changes here

    def excuse(self, seconds: float, now: float) -> None:
        """Move the start of each time-out on by `seconds`, in which the agent did not run."""
        if self.heard_at is not None:
            self.heard_at = min(now, self.heard_at + seconds)
        if self.moved_at is not None:
            self.moved_at = min(now, self.moved_at + seconds)
        if self.abort_sent_at is not None:
            self.abort_sent_at = min(now, self.abort_sent_at + seconds)

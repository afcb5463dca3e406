"""Events and actions of an agent: messages of the master, observations, and effects.

Events change what an agent knows; a completed action is an event too. Only `Assigned`, `Leave` and
`ShutDown` change the desired state. Must not know what an event changes.
"""

from dataclasses import dataclass

from oobleck.core.ids import Incarnation, JobId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Acknowledged, Assign, FaultRule, FromWorker, Measure
from oobleck.host.detection import Detection
from oobleck.host.gpu.sample import Sample
from oobleck.proto import types


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWarm:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWarm:
    """Action to kill the warm process by SIGKILL; `WarmExited` follows."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorker:
    """Action to fork a process for the slot and send it Launch as its first message."""

    slot: int
    job_id: JobId
    job: JobSpec
    #: An earlier process of the slot was ready for this job.
    passed: bool
    #: Latest time for it to be ready, extended by the time that fetching the job's code takes.
    ready_by: float
    #: An earlier process of the slot has asked for its replacement.
    replaced: bool = False
    #: Scripted faults of this worker.
    faults: tuple[FaultRule, ...] = ()
    #: How long another worker's host may be silent.
    silence_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    incarnation: Incarnation
    assign: Assign


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMeasure:
    incarnation: Incarnation
    wish: Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSave:
    """Action to send a worker the number of the newest wish for a checkpoint."""

    incarnation: Incarnation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAcknowledged:
    """Action to send a worker the acknowledgement of records on the master's disk."""

    incarnation: Incarnation
    acknowledged: Acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """Action to kill a worker by SIGKILL; its exit follows."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Action to end the agent, at the time for it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWorker:
    """Action to ask a worker for a heartbeat. `look`: the last question has no answer, so read the
    process's state from the kernel too."""

    incarnation: Incarnation
    look: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStacks:
    """Action to have a worker write its threads' stacks, before it is given up on."""

    incarnation: Incarnation
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpWorker:
    """Action to kill a worker that has hung since `since`, and to report it to the master."""

    incarnation: Incarnation
    since: float
    reason: str


Action = (
    StartWarm
    | KillWarm
    | ForkWorker
    | SendPlan
    | SendMeasure
    | SendSave
    | SendAcknowledged
    | AskWorker
    | AskStacks
    | GiveUpWorker
    | StopWorker
    | KillWorker
    | End
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Event: the master has sent an assignment."""

    desired: types.Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsStored:
    """Event: the master has these step records and evaluations of the job on its disk."""

    job_id: JobId
    acknowledged: Acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class NotUnderstood:
    """Event: the master's assignment cannot be read, so the one before stays in force."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Event: the agent is to end as soon as the node is drained, at the latest after the time."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBegan:
    """Event: a session with a master has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOver:
    """Event: the session has ended; no master hears the agent until the next one begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionTold:
    """Event: the master has sent its time-outs."""

    detection: Detection


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusRead:
    """Event: NVML has been read for the host's GPUs."""

    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Event: this agent did not run for `seconds`, so no process is blamed for its silence
    meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutDown:
    """Event: the agent is to end, and all workers are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReady:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmExited:
    """Event: the warm process and its workers are gone. The workers' exits are events of their
    own."""

    #: How it ended, and its last line of output.
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkAsked:
    slot: int
    incarnation: Incarnation
    #: The job's code is fetched first.
    fetches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerForked:
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFetched:
    """Event: the worker has its launch, with the job's code or the reason why there is none."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Event: a worker was asked for a heartbeat. `kernel`: its state according to the kernel."""

    incarnation: Incarnation
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    incarnation: Incarnation
    message: FromWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelClosed:
    """Event: the worker's end is closed, or sent something that makes no sense."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    incarnation: Incarnation
    #: How it ended; None: there never was a process.
    end: types.WorkerExited | None = None


#: Events about one worker.
WorkerEvent = (
    WorkerForked
    | CodeFetched
    | SendPlan
    | SendMeasure
    | SendSave
    | SendAcknowledged
    | Asked
    | AskStacks
    | StopWorker
    | KillWorker
    | GiveUpWorker
    | WorkerSaid
    | ChannelClosed
    | WorkerExited
)
Event = (
    Assigned
    | RecordsStored
    | NotUnderstood
    | SessionBegan
    | SessionOver
    | DetectionTold
    | Leave
    | GpusRead
    | Paused
    | ShutDown
    | StartWarm
    | WarmReady
    | KillWarm
    | WarmExited
    | ForkAsked
    | WorkerEvent
)

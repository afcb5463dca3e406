"""Everything that changes what an agent knows: the master's word, what was seen of the processes,
and what was done to them (an action that is done is an event).

Only `Assigned`, `Leave` and `ShutDown` change what is desired. Must not know what an event changes.
"""

from dataclasses import dataclass

from oobleck.agent.actions import (
    AskStacks,
    GiveUpWorker,
    KillWarm,
    KillWorker,
    SendAcknowledged,
    SendMeasure,
    SendPlan,
    SendSave,
    StartWarm,
    StopWorker,
)
from oobleck.host.detection import Detection
from oobleck.host.gpu.sample import Sample
from oobleck.host.ipc.messages import Acknowledged, FromWorker
from oobleck.planner.ids import Incarnation, JobId
from oobleck.proto import types


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The master's word."""

    desired: types.Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsStored:
    """Records of the job's steps, and its evaluations, that the master has on its disk."""

    job_id: JobId
    acknowledged: Acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class NotUnderstood:
    """The master's word cannot be read: what was desired before still is."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The agent is to end as soon as the node is drained, at the latest after the time."""

    grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBegan:
    """A master hears this agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOver:
    """No master hears it, until the next session begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionTold:
    """The time-outs that the master goes by."""

    detection: Detection


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusRead:
    """What NVML says of the host's GPUs."""

    sample: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """This agent did not run for so long: nobody is to blame for what did not come meanwhile."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutDown:
    """The agent is to end: all workers are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmReady:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmExited:
    """The warm process is gone, and its workers with it (their own exits come separately)."""

    #: Its end, and its last words.
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
    """The worker has got what it starts with, the job's code too, or the reason why there is
    none."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whether it is alive; `kernel`: the state that the kernel says it is in."""

    incarnation: Incarnation
    kernel: str


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
    #: How; None: there never was a process.
    end: types.WorkerExited | None = None


#: About one worker.
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

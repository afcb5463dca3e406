"""Events and actions of an agent: messages of the master, observations, and effects.

Events change what an agent knows; a completed action is an event too. Only `Assigned`, `Leave` and
`ShutDown` change the desired state. Must not know what an event changes.
"""

import msgspec

from oobleck.core.ids import Incarnation, JobId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Acknowledged, FaultRule, FromWorker, ToWorker
from oobleck.host.detection import Detection
from oobleck.host.gpu.sample import Sample
from oobleck.proto import types


class StartWarm(msgspec.Struct, frozen=True, kw_only=True):
    pass


class KillWarm(msgspec.Struct, frozen=True, kw_only=True):
    """Action to kill the warm process by SIGKILL; `WarmExited` follows."""

    reason: str


class ForkWorker(msgspec.Struct, frozen=True, kw_only=True):
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


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Action to send a worker a message."""

    incarnation: Incarnation
    message: ToWorker


class KillWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Action to kill a worker by SIGKILL; its exit follows."""

    incarnation: Incarnation
    reason: str


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Action to end the agent."""

    reason: str


class RequestHeartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """Action to ask a worker for a heartbeat. `look`: the last question has no answer, so read the
    process's state from the kernel too."""

    incarnation: Incarnation
    look: bool


class WriteStacks(msgspec.Struct, frozen=True, kw_only=True):
    """Action to have a worker write its threads' stacks, before it is given up on."""

    incarnation: Incarnation
    since: float


class GiveUpWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Action to kill a worker that has hung since `since`, and to report it to the master."""

    incarnation: Incarnation
    since: float
    reason: str


Action = (
    StartWarm
    | KillWarm
    | ForkWorker
    | Send
    | RequestHeartbeat
    | WriteStacks
    | GiveUpWorker
    | KillWorker
    | End
)


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the master has sent an assignment."""

    desired: types.Assignment


class RecordsStored(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the master has these step records and evaluations of the job on its disk."""

    job_id: JobId
    acknowledged: Acknowledged


class NotUnderstood(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the master's assignment cannot be read, so the one before stays in force."""

    reason: str


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the agent is to end as soon as the node is drained, at the latest after `grace_s`."""

    grace_s: float


class SessionBegan(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a session with a master has begun."""


class SessionOver(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the session has ended; no master hears the agent until the next one begins."""


class DetectionReceived(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the master has sent its time-outs."""

    detection: Detection


class GpusRead(msgspec.Struct, frozen=True, kw_only=True):
    """Event: NVML has been read for the host's GPUs."""

    sample: Sample


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """Event: this agent did not run for `seconds`, which do not count as silence of workers."""

    seconds: float


class ShutDown(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the agent is to end, and all workers are stopped."""


class WarmReady(msgspec.Struct, frozen=True, kw_only=True):
    pass


class WarmExited(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the warm process and its workers are gone; the workers' exits are further events."""

    #: How it ended, and its last line of output.
    how: str = ""


class ForkRequested(msgspec.Struct, frozen=True, kw_only=True):
    slot: int
    incarnation: Incarnation
    #: The job's code is fetched first.
    fetches: bool = False


class WorkerForked(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Incarnation
    pid: int


class CodeFetched(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the worker has its launch, with the job's code or the reason why there is none."""

    incarnation: Incarnation


class HeartbeatRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a worker was asked for a heartbeat. `kernel`: its state according to the kernel."""

    incarnation: Incarnation
    kernel: str


class WorkerMessage(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Incarnation
    message: FromWorker


class ChannelClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the worker's channel is closed, by the worker or after an invalid message."""

    incarnation: Incarnation


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Incarnation
    #: How it ended; None: there never was a process.
    end: types.WorkerExited | None = None


#: Events about one worker.
WorkerEvent = (
    WorkerForked
    | CodeFetched
    | Send
    | HeartbeatRequested
    | WriteStacks
    | KillWorker
    | GiveUpWorker
    | WorkerMessage
    | ChannelClosed
    | WorkerExited
)
Event = (
    Assigned
    | RecordsStored
    | NotUnderstood
    | SessionBegan
    | SessionOver
    | DetectionReceived
    | Leave
    | GpusRead
    | Paused
    | ShutDown
    | StartWarm
    | WarmReady
    | KillWarm
    | WarmExited
    | ForkRequested
    | WorkerEvent
)

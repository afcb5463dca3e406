"""What can be done to the processes of a node. Must not know when, nor how.

An action that is done is an event too: the state notes it as it was decided.
"""

from dataclasses import dataclass

from oobleck.host.ipc.messages import Acknowledged, Assign, FaultRule, Measure
from oobleck.planner.ids import Incarnation, JobId
from oobleck.planner.job.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWarm:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWarm:
    """By SIGKILL; `WarmExited` is still to come."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorker:
    """Fork a process for the slot and send it Launch as its first message."""

    slot: int
    job_id: JobId
    job: JobSpec
    #: One of the slot was ready for this job before.
    passed: bool
    #: When it is ready at the latest; later by as long as the job's code is fetched.
    ready_by: float
    #: One of the slot has asked for its replacement.
    replaced: bool = False
    #: Scripted ones that it shall have.
    faults: tuple[FaultRule, ...] = ()
    #: For so long another worker's host may be silent.
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
    """Hand it the number of the newest wish for a checkpoint."""

    incarnation: Incarnation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAcknowledged:
    """Tell it which records the master has on its disk."""

    incarnation: Incarnation
    acknowledged: Acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """By SIGKILL; its exit is still to come."""

    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The agent was told to end, and the time for it has come."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskWorker:
    """For a sign of life; `look`: the last question has no answer, so see what the kernel says."""

    incarnation: Incarnation
    look: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStacks:
    """Have it write where its threads are, before it is given up on."""

    incarnation: Incarnation
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpWorker:
    """It hangs, since `since`: kill it, and tell the master."""

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

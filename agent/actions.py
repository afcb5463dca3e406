"""Actions on the processes of a node. Must not know when they are taken, nor how.

An action that is done is an event too: the state notes it as it was decided.
"""

from dataclasses import dataclass

from oobleck.core.ids import Incarnation, JobId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Acknowledged, Assign, FaultRule, Measure


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
    """Action to send a worker the number of the newest wish for a checkpoint."""

    incarnation: Incarnation
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendAcknowledged:
    """Action to tell a worker which records the master has on its disk."""

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
    """Action to end the agent: it was told to, and the time for it has come."""

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

"""Unions of the two kinds of events: journaled and observed.

*Journaled* events (`Journaled`) are durable facts: operators' requests, members of the cluster, and
every decision of the master. They are on disk before their effects are visible, and the durable
part of the state follows from them alone. An event's tag is its class's name. *Observed* events
(`Observed`) are reports of agents and of the clock; a restarted master gets them again.

The shell stamps each event with the time of its arrival. Owns the two unions, the observed events,
and the journaled ones of the master itself.
"""

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import EvaluationRecord, Restored, StepRecord
from oobleck.core.profile import Profile
from oobleck.master.events.jobs import JobEvent, PlanEvent
from oobleck.master.events.nodes import NodeEvent, UnknownJobEnded
from oobleck.master.events.trust import TrustChanged
from oobleck.proto.types import Assignment, Happening, Head, NodeStatus


class StreamOpened(msgspec.Struct, frozen=True, kw_only=True):
    """Event: an agent has opened a session; session numbers are never reused."""

    node: NodeName
    session: int
    status: NodeStatus
    #: As in Registration.
    running: Assignment | None = None
    acted_on: Head | None = None


class AgentRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Event: an agent has registered under this name and was refused."""

    node: NodeName
    incarnation: Incarnation
    #: Head that the agent follows in place of this one; None: it was refused for another reason.
    follows: Head | None = None


class StreamClosed(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeName
    session: int


class StatusReceived(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeName
    status: NodeStatus


class WorkerReported(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a worker's process. A new session of its agent may repeat it."""

    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    what: Happening


class ProfilesFound(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the stored profiles were read: by key, and the reasons why some cannot be read."""

    profiles: dict[str, Profile]
    unusable: dict[str, str] = {}


class RecordsReceived(msgspec.Struct, frozen=True, kw_only=True):
    """Event: new step records, on disk in metrics.jsonl in step order; and confirmed records
    `ahead` of them, which wait for earlier ones."""

    job_id: JobId
    records: tuple[StepRecord, ...]
    ahead: tuple[StepRecord, ...] = ()


class RecordsWait(msgspec.Struct, frozen=True, kw_only=True):
    """Event: step records begin, or cease, to wait for records of earlier steps. After some time
    they are written without those."""

    job_id: JobId
    waiting: bool


class RestoreReceived(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a confirmed report that all workers of a generation have loaded a checkpoint."""

    job_id: JobId
    restored: Restored


class EvaluationReceived(msgspec.Struct, frozen=True, kw_only=True):
    """Event: an evaluation is on disk, as a line of evaluations.jsonl."""

    job_id: JobId
    record: EvaluationRecord


class NodesIdle(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the reason has changed why nodes that are ready for the job are not in its plan;
    empty: none, or they will be."""

    job_id: JobId
    why: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Event: time has passed. `late_s` is how much later than planned the master looks."""

    late_s: float
    #: True if the master was late enough that agents may have ended their streams.
    cut: bool


Observed = (
    StreamOpened
    | AgentRefused
    | StreamClosed
    | StatusReceived
    | ProfilesFound
    | RecordsReceived
    | RecordsWait
    | EvaluationReceived
    | RestoreReceived
    | NodesIdle
    | Tick
    | WorkerReported
)


class MasterStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a master has replayed the journal; observations of an earlier one are forgotten."""

    #: Random id of the process.
    start: str


class JournalCut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the journal ended in an incomplete event, or lacked events whose effects are
    visible."""

    #: Number of bytes cut off, and the file that keeps them.
    bytes: int
    kept_as: str
    #: Number of lines in events.jsonl of each job that has more than the journal gives.
    records: dict[JobId, int]


class TermBegan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: this master begins a term of its own, or names its journal for the first time."""

    cluster: str
    #: Id of the journal.
    history: str
    number: int
    #: Random id of the master that begins it.
    begun_by: str
    #: Place of its state directory.
    place: str
    #: Reason for operators.
    reason: str


Journaled = (
    MasterStarted
    | TermBegan
    | JournalCut
    | NodeEvent
    | UnknownJobEnded
    | JobEvent
    | PlanEvent
    | TrustChanged
)
Event = Journaled | Observed

"""Observed events: what the agents and the clock tell, see `oobleck.master.events.unions`. Must not
know what the events change.
"""

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import EvaluationRecord, Restored, StepRecord
from oobleck.core.profile import Profile
from oobleck.proto.types import Assignment, Happening, Head, NodeStatus


class StreamOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's newest session; a session number is never used twice."""

    node: NodeName
    session: int
    status: NodeStatus
    #: As in Registration.
    running: Assignment | None = None
    acted_on: Head | None = None


class AgentRefused(msgspec.Struct, frozen=True, kw_only=True):
    """An agent has registered under this name and was refused."""

    node: NodeName
    incarnation: Incarnation
    #: The head that it follows in place of this one; None: that is not why.
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
    """Profiles in the store, by key, and the reasons why others cannot be read."""

    profiles: dict[str, Profile]
    unusable: dict[str, str] = {}


class RecordsReceived(msgspec.Struct, frozen=True, kw_only=True):
    """New lines of metrics.jsonl, in step order, now on disk."""

    job_id: JobId
    records: tuple[StepRecord, ...]


class RecordsWait(msgspec.Struct, frozen=True, kw_only=True):
    """Change of whether step records wait for records of earlier steps. After some time they are
    written without those."""

    job_id: JobId
    waiting: bool


class RestoreReceived(msgspec.Struct, frozen=True, kw_only=True):
    """Report that all workers of a generation restored a checkpoint, confirmed by those that could
    tell."""

    job_id: JobId
    restored: Restored


class EvaluationReceived(msgspec.Struct, frozen=True, kw_only=True):
    """A new line of evaluations.jsonl, now on disk."""

    job_id: JobId
    record: EvaluationRecord


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed; `late_s` is how much later than planned the master looks."""

    late_s: float
    #: Late enough for agents to have given up their streams because of it.
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
    | Tick
    | WorkerReported
)

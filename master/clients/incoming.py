"""Types of messages that agents send in a running session."""

import msgspec

from oobleck.core.ids import Generation, JobId
from oobleck.core.messages import StepRecord
from oobleck.proto.types import NodeStatus, WorkerReport


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """Step records as an agent hands them over, in any order and again and again."""

    job_id: JobId
    records: tuple[StepRecord, ...]
    #: The generation that has found them beside a checkpoint; 0: workers of the node made them.
    restored_in: Generation = Generation(0)


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one worker's output."""

    job_id: JobId
    slot: int
    lines: tuple[str, ...]


Incoming = NodeStatus | WorkerReport | Records | Output

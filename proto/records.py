"""What committed steps leave behind, as messages and back: records and lines of output."""

from collections.abc import Sequence

from oobleck.host.ipc.messages import StepRecord
from oobleck.planner.ids import JobId
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import at_least, in_field, read_job_id, read_slot
from oobleck.proto.fields import message_of, struct_of


def records_message(job_id: JobId, records: Sequence[StepRecord]) -> pb.StepRecords:
    return pb.StepRecords(
        job_id=job_id, records=[message_of(pb.StepRecord, record) for record in records]
    )


def _read_record(message: pb.StepRecord) -> StepRecord:
    with in_field("record"):
        at_least(message.step, 1, "step")
        return struct_of(StepRecord, message)


def read_records(message: pb.StepRecords) -> tuple[JobId, tuple[StepRecord, ...]]:
    """Raises ValueError that names the field, as all readers do."""
    with in_field("records"):
        return read_job_id(message.job_id), tuple(map(_read_record, message.records))


def dropped_line(count: int) -> str:
    """Return what stands in the place of so many lines of output."""
    return f"[{count} lines were dropped here: too many at once]"


def read_output(message: pb.LogLines) -> tuple[JobId, int, tuple[str, ...]]:
    """Job, slot and lines of a worker's output; a gap is told in a line of its own."""
    with in_field("log"):
        lines = tuple(message.lines)
        if message.dropped:
            lines = (dropped_line(message.dropped), *lines)
        return read_job_id(message.job_id), read_slot(message.slot), lines

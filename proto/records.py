"""Conversion of records and lines of output to messages and back."""

from collections.abc import Sequence

from oobleck.core.ids import Generation, JobId
from oobleck.core.messages import StepRecord
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import at_least, in_field, read_job_id, read_slot
from oobleck.proto.fields import message_of, struct_of

_MADE_HERE = Generation(0)


def records_message(
    job_id: JobId, records: Sequence[StepRecord], restored_in: Generation = _MADE_HERE
) -> pb.StepRecords:
    return pb.StepRecords(
        job_id=job_id,
        records=[message_of(pb.StepRecord, record) for record in records],
        restored_in=restored_in,
    )


def _read_record(message: pb.StepRecord) -> StepRecord:
    with in_field("record"):
        at_least(message.step, 1, "step")
        return struct_of(StepRecord, message)


def read_records(message: pb.StepRecords) -> tuple[JobId, tuple[StepRecord, ...], Generation]:
    """Return the job, the records, and the generation that found them beside a checkpoint. Raises
    ValueError that names the field."""
    with in_field("records"):
        records = tuple(map(_read_record, message.records))
        return read_job_id(message.job_id), records, Generation(message.restored_in)


def dropped_line(count: int) -> str:
    """Return the line that replaces so many dropped lines of output."""
    return f"[{count} lines were dropped here: too many at once]"


def read_output(message: pb.LogLines) -> tuple[JobId, int, tuple[str, ...]]:
    """Read job, slot and lines of a worker's output; a gap is reported in a line of its own."""
    with in_field("log"):
        lines = tuple(message.lines)
        if message.dropped:
            lines = (dropped_line(message.dropped), *lines)
        return read_job_id(message.job_id), read_slot(message.slot), lines

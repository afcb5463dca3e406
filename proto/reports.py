"""Conversion of workers' reports, records and lines of output to messages and back.

Reports are JSON text. Most are too short to be compressed.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.ids import Generation, JobId
from oobleck.core.messages import StepRecord
from oobleck.core.units import head
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import check_bounds
from oobleck.proto.checks import (
    at_least,
    ending,
    in_field,
    message_of,
    read_incarnation,
    read_job_id,
    read_slot,
    struct_of,
)
from oobleck.proto.types import WorkerReport

#: Texts for people, of which the beginning matters most. A path is not cut, since it would name
#: another place.
_CUT = frozenset({"message", "reason", "detail", "problem", "passed_over"})
#: Most bytes of a report. The master reads reports in its loop; a list of workers of twice this
#: size was measured to take it 30 ms.
MOST_REPORT_BYTES = 448 << 10


def report_bytes(report: WorkerReport) -> bytes:
    """Return the report as JSON; long reasons keep their beginning, a worker's output its end."""
    return encode(_shortened(msgspec.to_builtins(report)))


def _shortened(value: Any, field: str = "") -> Any:
    match value:
        case str():
            if field == "log_tail":
                return ending(value)
            return head(value) if field in _CUT else value
        case dict():
            return {key: _shortened(item, key) for key, item in value.items()}
        case list() | tuple():
            return [_shortened(item, field) for item in value]
        case _:
            return value


def read_report(data: bytes) -> WorkerReport:
    """Read a report; raises ValueError that names the field."""
    with in_field("report"):
        if len(data) > MOST_REPORT_BYTES:
            raise ValueError(f"{len(data)} bytes are more than {MOST_REPORT_BYTES}")
        report = decode(WorkerReport, data)
        check_bounds(report)
        read_job_id(report.job_id)
        read_slot(report.slot)
        read_incarnation(report.incarnation)
        return report


# ---- records and lines of output


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
    """Return job, records, and the generation that restored them. Raises ValueError."""
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

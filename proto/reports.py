"""Conversion of workers' reports to JSON text and back. Most are too short to be compressed."""

from typing import Any

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.units import head
from oobleck.proto.bounds import check_bounds
from oobleck.proto.checks import ending, in_field, read_incarnation, read_job_id, read_slot
from oobleck.proto.types import WorkerReport

#: Texts for people, of which the beginning matters most. A path is not cut, since it would name
#: another place.
_CUT = frozenset({"message", "reason", "detail", "problem", "passed_over"})
#: Most bytes of a report. The master reads reports in its loop; a list of workers of this size was
#: measured to take it 30 ms.
MOST_REPORT_BYTES = 1 << 20


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

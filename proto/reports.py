"""What happens to workers, packed and back."""

from oobleck.proto.checks import in_field, read_incarnation, read_job_id, read_slot
from oobleck.proto.packed import pack, unpack
from oobleck.proto.types import WorkerReport


def report_bytes(report: WorkerReport) -> bytes:
    return pack(report)


def read_report(data: bytes) -> WorkerReport:
    """Raises ValueError that names the field."""
    with in_field("report"):
        report = unpack(WorkerReport, data)
        read_job_id(report.job_id)
        read_slot(report.slot)
        read_incarnation(report.incarnation)
        return report

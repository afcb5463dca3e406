"""The one place between protobuf messages and domain types; what it gathers is written by concern.

`read_x(message)` gives the domain value and raises ValueError with the field's name where the
message is malformed; `x_message(value)` gives the message. Must not know who is talking.
"""

from oobleck.proto.assignments import (
    assignment_message,
    measure_message,
    read_assignment,
    read_measure,
)
from oobleck.proto.checks import read_incarnation
from oobleck.proto.plans import (
    plan_message,
    read_plan,
    read_rendezvous,
    read_serialised_plan,
    read_worker,
    rendezvous_message,
    serialise_plan,
    worker_message,
)
from oobleck.proto.records import (
    evaluation_message,
    read_output,
    read_record,
    read_records,
    record_message,
    records_message,
)
from oobleck.proto.reports import read_report, report_bytes
from oobleck.proto.status import (
    read_register,
    read_status,
    read_versions,
    register_message,
    status_message,
    versions_message,
    worker_status_message,
)

__all__ = [
    "assignment_message",
    "evaluation_message",
    "measure_message",
    "plan_message",
    "read_assignment",
    "read_incarnation",
    "read_measure",
    "read_output",
    "read_plan",
    "read_record",
    "read_records",
    "read_register",
    "read_rendezvous",
    "read_report",
    "read_serialised_plan",
    "read_status",
    "read_versions",
    "read_worker",
    "record_message",
    "records_message",
    "register_message",
    "rendezvous_message",
    "report_bytes",
    "serialise_plan",
    "status_message",
    "versions_message",
    "worker_message",
    "worker_status_message",
]

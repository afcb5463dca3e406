"""Conversion of a node's assignments to messages and back."""

from functools import lru_cache

from oobleck.core.ids import check_name
from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, Measure
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import at_least, in_field, read_card, read_incarnation, read_job_id
from oobleck.proto.heads import head_message, head_of
from oobleck.proto.packed import pack, unpack
from oobleck.proto.types import Assignment


def assignment_message(assignment: Assignment) -> pb.Assignment:
    return pb.Assignment(
        version=assignment.version,
        job_id=assignment.job_id or "",
        job=_job_text(assignment.job) if assignment.job is not None else "",
        assign=_packed(assignment.assign) if assignment.assign is not None else b"",
        worker_incarnations=assignment.worker_incarnations,
        measure=_packed(assignment.measure) if assignment.measure is not None else b"",
        save=assignment.save,
        drained=assignment.drained,
        head=head_message(assignment.head) if assignment.head is not None else None,
    )


def read_assignment(message: pb.Assignment) -> Assignment:
    """Read a node's assignment; raises ValueError that names the field."""
    with in_field("assignment"):
        return Assignment(
            version=message.version,
            job_id=read_job_id(message.job_id) if message.job_id else None,
            job=_read_job(message.job) if message.job else None,
            assign=_read_assign(message.assign) if message.assign else None,
            worker_incarnations=tuple(map(read_incarnation, message.worker_incarnations)),
            measure=_read_measure(message.measure) if message.measure else None,
            save=message.save,
            drained=message.drained,
            head=head_of(message),
        )


# All nodes get and send the same data, which takes milliseconds to encode for a thousand nodes.


@lru_cache(maxsize=4)
def _packed(told: Assign | Measure) -> bytes:
    return pack(told)


#: Newest job that was sent, and its text.
_told: list[tuple[JobSpec, str]] = []


def _job_text(job: JobSpec) -> str:
    """Return the job's text, cached by identity: parts of a job need not have a hash."""
    if not _told or _told[0][0] is not job:
        _told[:] = [(job, format_job(job, defaults=False))]
    return _told[0][1]


@lru_cache(maxsize=4)
def _read_job(text: str) -> JobSpec:
    return parse_job(text)


@lru_cache(maxsize=4)
def _read_assign(data: bytes) -> Assign:
    with in_field("assign"):
        assign = unpack(Assign, data)
        at_least(assign.plan.generation, 1, "generation")
        for node in assign.plan.nodes:
            check_name(node, "node")
        if not assign.rendezvous.prefix:
            raise ValueError("prefix: is empty")
        read_card(assign.rendezvous.host, "host")
        return assign


def _read_measure(data: bytes) -> Measure:
    with in_field("measure"):
        measure = unpack(Measure, data)
        at_least(measure.attempt, 1, "attempt")
        at_least(measure.gpus, 1, "gpus")
        for pair in measure.meetings:
            read_card(pair.rendezvous.host, "host")
        return measure

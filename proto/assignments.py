"""Conversion of a node's assignments, and of a head's identity, to messages and back.

Plans and wishes pass whole, as bytes: the JSON text of a Struct, compressed. A field that is added
to such a Struct is carried, checked against its type and kept within bounds without an edit here or
in the .proto file.
"""

import json
import re
import zlib
from functools import lru_cache
from typing import TypeVar

from oobleck.core.codec import decode, encode
from oobleck.core.ids import check_name
from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, Measure
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import MOST_RECEIVED_BYTES, check_bounds
from oobleck.proto.checks import (
    at_least,
    in_field,
    message_of,
    read_card,
    read_incarnation,
    read_job_id,
    struct_of,
)
from oobleck.proto.types import Assignment, Head

# ---- identity of a head


#: Largest term that is accepted; each restore takes one. The generations of all terms are below the
#: greatest that a master accepts.
MOST_TERM = 1 << 23
_ID = re.compile(r"[0-9a-f]{8,64}")


def head_message(head: Head) -> pb.Head:
    return message_of(pb.Head, head)


def read_head(message: pb.Head) -> Head:
    """Read a head; raises ValueError that names the field."""
    for name in ("history", "begun_by", "cluster", "start"):
        if _ID.fullmatch(text := getattr(message, name)) is None:
            raise ValueError(f"{name}: {text[:80]!r} is not 8 to 64 lower-case hex digits")
    at_least(message.term, 1, "term")
    if message.term > MOST_TERM:
        raise ValueError(f"term: {message.term} is above {MOST_TERM}")
    return struct_of(Head, message)


def head_of(message: pb.Welcome | pb.Assignment) -> Head | None:
    """Return the message's head; None if it names none. Raises ValueError."""
    if not message.HasField("head"):
        return None
    with in_field("head"):
        return read_head(message.head)


T = TypeVar("T")
#: Fast; a plan of a thousand nodes has a fifteenth of its size then.
_LEVEL = 1
#: How much larger the text may be than its data. A plan's is 10 to 15 times as large.
_MOST_RATIO = 64
#: Bytes of a text that may always be there, and of any: that of a plan for 24,000 workers with
#: their cards, which takes the master's loop 40 ms.
_SMALL, _MOST_TEXT = 1 << 20, 4 << 20


def pack(value: object) -> bytes:
    """Read by `unpack`, where it keeps within bounds."""
    return zlib.compress(encode(value), _LEVEL)


def unpack(kind: type[T], data: bytes) -> T:
    """Decode packed data. Raises ValueError if they are no `kind`, or break a bound. A text that is
    far larger than honest data of that size is refused undecoded."""
    most = min(_MOST_TEXT, _SMALL + _MOST_RATIO * len(data))
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, most)
    except zlib.error as error:
        raise ValueError("the data are not compressed") from error
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError(
            f"the data are cut off, have bytes after their end, or hold more than {most}"
        )
    value = decode(kind, text)
    check_bounds(value)
    return value


def fitted(message: pb.Assignment) -> pb.Assignment:
    """Return a node's assignment with a plan, as a registration has room for it: a large plan is
    without the cards of its workers, which are most of it and speed up their meeting alone. Fields
    of later releases stay."""
    if message.ByteSize() <= MOST_RECEIVED_BYTES // 2:
        return message
    tree = json.loads(zlib.decompress(message.assign))
    tree["rendezvous"].pop("cards", None)
    found = pb.Assignment()
    found.CopyFrom(message)
    found.assign = pack(tree)
    return found


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


@lru_cache(maxsize=4)
def _packed(wish: Assign | Measure) -> bytes:
    return pack(wish)


#: Newest job that was sent, and its text.
_newest_job: list[tuple[JobSpec, str]] = []


def _job_text(job: JobSpec) -> str:
    """Return the job's text, cached by identity: parts of a job need not have a hash."""
    if not _newest_job or _newest_job[0][0] is not job:
        _newest_job[:] = [(job, format_job(job, defaults=False))]
    return _newest_job[0][1]


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

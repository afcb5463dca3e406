"""Bounds on the content of messages, checked before any other use of them.

Every number has a sign and a limit, every text and list a length, also in packed data. The tables
name a field by the type that it is in. Bounds are far above what a cluster sends, so a message that
breaks one is damaged or malicious. Must not know the meaning of fields.

The parser makes an object for each item of a list, which may take a hundred times the two bytes of
an encoded item. So the fields of a large message are counted in its bytes before it is parsed
(`check_encoded`). Their values are checked in the parsed message (`check_bounds`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from oobleck.core.ids import WorkerId, check_name

#: Longest text.
MOST_CHARACTERS = 64 << 10
#: Longest text that names or describes one thing, in a line.
MOST_LINE = 1024
#: Longest list.
MOST_ITEMS = 4096
#: Largest integer: the most that every reader of JSON can hold.
MOST_NUMBER = (1 << 63) - 1

#: Most workers of a host.
MOST_SLOTS = 1024
#: Largest message to the master. gRPC has one limit for all methods, so any caller can send as much
#: in any call, and each byte is in memory twice. A plan of 12,000 workers, packed with their cards,
#: has 450 KiB. Longer content, such as recordings and wheels, comes in parts.
MOST_RECEIVED_BYTES = 512 << 10
#: Bytes of a part of a wheel.
PART_BYTES = 256 << 10
#: Most bytes of a field: that of the whole message.
MOST_BYTES = 16 << 20
#: Most bytes of a message in another one. The largest hold a plan of all nodes.
MOST_MESSAGE_BYTES = 2 << 20
#: Messages up to this size are parsed without counting: 32,768 empty items, the most that fit, were
#: measured to take 10 ms and 3 MB.
SMALL_BYTES = 64 << 10
#: Most fields of a message and of those in it, without those in the items of lists.
_MOST_FIELDS = 8192

_TEXTS: Mapping[str, int] = {
    "Recorded.recording": MOST_RECEIVED_BYTES,
    "JobTold.job": MOST_BYTES,
    # Their readers refuse these with a better reason.
    "SubmitRequest.job": MOST_BYTES,
    "SubmitRequest.profile": MOST_BYTES,
    "JoinRequest.request": MOST_BYTES,
}
#: Fields that go into tables and logs, so no character in them may move a cursor.
_LINES = frozenset(
    {
        "Head.begun_by",
        "Head.cluster",
        "Head.history",
        "Head.start",
        "Register.hostname",
        "Register.address",
        "Register.device_kind",
        "Register.boot",
        "CodePolicy.allows",
        "Versions.oobleck",
        "Versions.python",
        "Versions.torch",
        "Versions.transformers",
        "Versions.cuda",
        "Versions.nccl",
        "Versions.driver",
        "Versions.engine",
        "WorkerStatus.card",
        "WorkerStatus.data",
        "WorkerStatus.doing",
        "WorkerStatus.hindrance",
        "NodeStatus.sick",
        "NodeStatus.concern",
        "CheckpointSaved.path",
        "Restored.path",
        "Restored.job",
        "Restored.records_problem",
        "StepRecord.samples_digest",
        "ClockRead.boot",
        "DrainNodesRequest.reason",
    }
)
_LISTS: Mapping[str, int] = {
    # An agent sends 256 at a time.
    "StepRecords.records": 1024,
    "NodeStatus.workers": MOST_SLOTS,
    "WorkerStatus.also_entered": 64,
    # A master remembers some such requests, by node.
    "DrainNodesRequest.nodes": 256,
    # Entries for all workers of a cluster: a plan has as many routes and stages at most.
    "Assign.leaving": 1 << 17,
    "PeerLost.unreached": 1 << 17,
    "Rendezvous.cards": 1 << 17,
    "Plan.holds": 1 << 17,
    "Plan.routes": 1 << 17,
    "Plan.rates": 1 << 17,
    "Listing.room": 1 << 17,
    "Listing.hops": 1 << 17,
}
#: Numbers that may be below zero.
_SIGNED = frozenset(
    {
        "EvaluationRecord.loss",
        "EvaluationRecord.metrics",
        "StepRecord.loss",
        "WorkerStatus.committed_step",
        "PhaseReached.committed_step",
        "WorkerExited.exit_code",
        "PeerLost.step",
        "ClockRead.monotonic_ns",
    }
)


def check_encoded(kind: Descriptor, data: bytes) -> None:
    """Check how many items and bytes an encoded message holds, without parsing it. Raises
    ValueError."""
    if len(data) <= SMALL_BYTES:
        return
    left = _MOST_FIELDS
    parts = [(kind, memoryview(data))]
    while parts:
        kind, part = parts.pop()
        items: Counter[str] = Counter()
        for number, content in _encoded_fields(part):
            left -= 1
            if left < 0:
                raise ValueError(f"the message has more than {_MOST_FIELDS} fields")
            field: FieldDescriptor | None = kind.fields_by_number.get(number)
            if field is None or content is None:
                continue
            key = f"{kind.name}.{field.name}"
            if field.is_repeated:
                items[key] += 1
                if items[key] > (most := _most_items(key)):
                    raise _wrong(key, f"there are more than {most} items")
            elif field.message_type is not None:
                if len(content) > MOST_MESSAGE_BYTES:
                    raise _wrong(key, f"{len(content)} bytes are more than {MOST_MESSAGE_BYTES}")
                parts.append((field.message_type, content))


def _encoded_fields(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Yield each field's number and, if it has a length, its content (see
    protobuf.dev/programming-guides/encoding). Raises ValueError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        content: memoryview | None = None
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                content = data[at : at + size]
                at += size
            case 5:
                at += 4
            case other:
                raise ValueError(f"the data are no message: a field of type {other}")
        if at > len(data):
            raise ValueError("the data are no message: they are cut off")
        yield tag >> 3, content


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins there, and the offset of its end. Raises ValueError."""
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("the data are no message: a number has no end")


def check_bounds(value: object) -> None:
    """Check all values in a message, Struct or dataclass. Raises ValueError that names the
    field."""
    if isinstance(value, Message):
        message = value.DESCRIPTOR.name
        for field, inner in value.ListFields():
            check = _check_items if field.is_repeated else _check
            check(f"{message}.{field.name}", inner)
        return
    kind: Any = type(value)
    for name, key in _fields(kind):
        _check(key, getattr(value, name))


@cache
def _fields(kind: type) -> tuple[tuple[str, str], ...]:
    """Return the fields of a Struct or dataclass: names, and keys in the tables."""
    if issubclass(kind, msgspec.Struct):
        names: Iterable[str] = kind.__struct_fields__
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind)]
    else:
        raise TypeError(f"there is no bound for {kind.__name__}")
    return tuple((name, f"{kind.__name__}.{name}") for name in names)


def _check(key: str, value: object) -> None:
    """Check one value. `key`: the type that contains the value, and the field."""
    match value:
        case str():
            _check_text(key, value)
        case None | bool():
            pass
        case int() | float():
            _check_number(key, value)
        case bytes():  # their content is checked when it is read
            if len(value) > MOST_BYTES:
                raise _wrong(key, f"{len(value)} bytes are more than {MOST_BYTES}")
        case WorkerId():
            _check_worker(value)
        case tuple() | list() | dict():
            _check_items(key, value)
        case _:
            check_bounds(value)


def _most_items(key: str) -> int:
    return _LISTS.get(key, MOST_ITEMS)


def _check_items(key: str, items: Collection[object]) -> None:
    if len(items) > (most := _most_items(key)):
        raise _wrong(key, f"{len(items)} items are more than {most}")
    for item in (*items, *items.values()) if isinstance(items, dict) else items:
        _check(key, item)


def _wrong(key: str, problem: str) -> ValueError:
    return ValueError(f"{key.rpartition('.')[2]}: {problem}")


def _check_number(key: str, value: float) -> None:
    if isinstance(value, int):
        if abs(value) > MOST_NUMBER:
            raise _wrong(key, f"the number is above {MOST_NUMBER}")
    elif not math.isfinite(value):
        raise _wrong(key, f"{value} is not a number")
    if value < 0 and key not in _SIGNED:
        raise _wrong(key, f"{value} is below 0")


def _check_worker(worker: WorkerId) -> None:
    check_name(worker.node, "node")
    if not 0 <= worker.slot < MOST_SLOTS:
        raise ValueError(f"slot: {worker.slot} is not below {MOST_SLOTS}")


def _check_text(key: str, text: str) -> None:
    line = key in _LINES
    most = MOST_LINE if line else _TEXTS.get(key, MOST_CHARACTERS)
    if len(text) > most:
        raise _wrong(key, f"{len(text)} characters are more than {most}")
    if line and not text.isprintable():
        raise _wrong(key, f"{text[:80]!r} has characters that cannot be printed")

"""Every field of every message that a client may send has a bound."""

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from oobleck.agent.connection.outbox import _PART_CHARACTERS, BATCH
from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Assign, Measure
from oobleck.core.orders import Answer, Clock, Finding, Looked
from oobleck.proto import bounds
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import read_assignment
from oobleck.proto.examinations import examined_message, read_answer
from oobleck.proto.reports import read_report, report_bytes
from oobleck.proto.types import Hung, WorkerReport

WHOLE = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)
REAL = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def below(message: Descriptor, found: dict[str, Descriptor]) -> None:
    if message.full_name not in found:
        found[message.full_name] = message
        for field in message.fields:
            if field.message_type is not None:
                below(field.message_type, found)


def incoming() -> Iterator[FieldDescriptor]:
    """All fields that can come to a master."""
    found: dict[str, Descriptor] = {}
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            below(method.input_type, found)
    for message in found.values():
        yield from message.fields


FIELDS = sorted(incoming(), key=lambda field: str(field.full_name))


def holding(field: FieldDescriptor, value: object) -> Message:
    message = GetMessageClass(field.containing_type)()
    if field.is_repeated:
        getattr(message, field.name).extend([value])
    else:
        setattr(message, field.name, value)
    return message


def beyond(field: FieldDescriptor) -> list[object]:
    """Values that no cluster sends."""
    if field.cpp_type in REAL:
        return [math.nan, math.inf, -math.inf]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return [b"x" * ((16 << 20) + 1)]
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return ["x" * ((16 << 20) + 1)]
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
        return [(1 << 64) - 1]
    return []


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.full_name)
def test_no_field_takes_everything(field: FieldDescriptor) -> None:
    for value in beyond(field):
        with pytest.raises(ValueError, match=f"^{field.name}: "):
            bounds.check_bounds(holding(field, value))
    if field.is_repeated:
        message = GetMessageClass(field.containing_type)()
        number = field.cpp_type == FieldDescriptor.CPPTYPE_UINT64
        item = GetMessageClass(field.message_type)() if field.message_type else 0 if number else ""
        getattr(message, field.name).extend([item] * ((1 << 17) + 1))
        with pytest.raises(ValueError, match=f"^{field.name}: .* items"):
            bounds.check_bounds(message)


def test_only_known_kinds_of_fields_come_in() -> None:
    """`check_bounds` has a case for each."""
    kinds = {field.cpp_type for field in FIELDS}
    text, message = FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE
    assert kinds <= {*WHOLE, *REAL, text, message, FieldDescriptor.CPPTYPE_BOOL}
    packed = {str(f.full_name) for f in FIELDS if f.type == FieldDescriptor.TYPE_BYTES}
    assert packed == {
        "oobleck.AgentMessage.report",
        "oobleck.Examined.answer",
        "oobleck.Assignment.assign",
        "oobleck.Assignment.measure",
        "oobleck.CodeChunk.data",  # a wheel's, which its reader looks at
    }


def fields_below(kind: Any) -> Iterator[tuple[type, str, Any]]:
    """The fields of a Struct or dataclass and of all that stand in it, with their types."""
    if msgspec.inspect.is_struct_type(kind) or is_dataclass(kind):
        for name, inner in get_type_hints(kind).items():
            if not name.startswith("_"):
                yield kind, name, inner
                yield from fields_below(inner)
    for inner in get_args(kind):
        yield from fields_below(inner)


PACKED = [found for kind in (WorkerReport, Assign, Measure, Answer) for found in fields_below(kind)]


def wrong_values(kind: Any) -> list[object]:
    """What no cluster sends, of each type that the field may have."""
    kind = getattr(kind, "__supertype__", kind)
    if get_origin(kind) in (UnionType, Union):
        return [value for one in get_args(kind) for value in wrong_values(one)]
    if get_origin(kind) is tuple:
        wrong_items = [value for one in get_args(kind) for value in wrong_values(one)]
        return [("x",) * ((1 << 17) + 1), *((value,) for value in wrong_items)]
    if get_origin(kind) is Mapping:
        return [dict.fromkeys(range(5000), 1)]
    wrong: dict[object, list[object]] = {
        int: [1 << 63, 10**400],
        float: [math.nan, math.inf, -math.inf],
        str: ["x" * ((64 << 10) + 1)],
        WorkerId: [WorkerId(NodeName("../n"), 0), WorkerId(NodeName("n1"), 1024)],
    }
    return wrong.get(kind, [])


def test_nor_does_one_that_is_packed() -> None:
    """Whatever is put into any field of a report."""
    tried = set()
    for kind, name, hint in PACKED:
        for value in wrong_values(hint):
            tried.add(type(value))
            with pytest.raises(ValueError, match=r"^(\w+: |node name)"):
                bounds._check(f"{kind.__name__}.{name}", value)
    assert tried == {int, float, str, tuple, dict, WorkerId}
    assert any(get_args(hint)[:1] == (WorkerId,) for _, _, hint in PACKED)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no", "not compressed"),
        (zlib.compress(b"{}")[:-1], "cut off"),
        (zlib.compress(bytes((4 << 20) + 1), 0), "more than"),
        (zlib.compress(b"[" * 60_000), "not a valid Assign"),
        (zlib.compress(b"[" * 2_000_000), "more than"),
        (zlib.compress(b"{}") + b"{}", "bytes after their end"),
        (zlib.compress(b"{}"), "not a valid Assign"),
    ],
)
def test_what_is_no_assignment_is_told(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^assignment: assign: .*{reason}"):
        read_assignment(pb.Assignment(version=1, assign=data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a valid WorkerReport"),
        (b"{}", "not a valid WorkerReport"),
        (b"[" * 60_000, "not a valid WorkerReport"),
        (bytes((448 << 10) + 1), "more than"),
        (
            b'{"job_id": "j", "slot": 0, "incarnation": "ab", "what": {"type": "measured", '
            b'"attempt": 1, "measurement": null, "alone_s": [1, 0]}}',
            "alone_s: 0.0 is no time",
        ),
    ],
)
def test_what_is_no_report_is_told(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^report: .*{reason}"):
        read_report(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a valid answer"),
        (b'{"type": "whatever"}', "not a valid answer"),
        (b"[" * 60_000, "not a valid answer"),
        (bytes((448 << 10) + 1), "more than"),
        (b'{"type": "time", "unix": -1}', "unix: "),
        (b'{"type": "looked", "findings": [{"check": "x", "level": "bad", "what": ""}]}', "level"),
    ],
)
def test_what_is_no_answer_to_an_examination_is_told(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^answer: .*{reason}"):
        read_answer(pb.Examined(number=1, answer=data))


def test_an_answer_comes_as_it_was_given() -> None:
    finding = Finding(check="c", level="warn", what="w", fix="f", figures={"bytes": 1.5})
    for answer in (Clock(unix=1e9), Looked(findings=(finding,), mtu=1500)):
        assert read_answer(examined_message(7, answer)) == answer


def test_a_number_of_hundreds_of_digits_is_told() -> None:
    right = WorkerReport(
        job_id=JobId("demo-1"),
        slot=1023,
        incarnation=Incarnation("abcd"),
        what=Hung(reason="stopped", seconds=1.0),
    )
    text = report_bytes(right).replace(b"1023", b"9" * 400)
    with pytest.raises(ValueError, match=r"^report: slot: the number is above"):
        read_report(text)


def test_a_report_is_of_a_job_a_slot_and_a_process() -> None:
    right = WorkerReport(
        job_id=JobId("demo-1"),
        slot=1023,
        incarnation=Incarnation("abcd"),
        what=Hung(reason="stopped", seconds=1.0),
    )
    assert read_report(report_bytes(right)) == right
    for wrong in ({"job_id": "Demo 1"}, {"slot": 1024}, {"slot": -1}, {"incarnation": "x"}):
        with pytest.raises(ValueError, match=r"^report: (job_id|slot|incarnation): "):
            read_report(report_bytes(msgspec.structs.replace(right, **wrong)))


@pytest.mark.parametrize("table", [bounds._TEXTS, bounds._LINES, bounds._LISTS, bounds._SIGNED])
def test_the_tables_name_fields_that_there_are(table: object) -> None:
    names = {f"{field.containing_type.name}.{field.name}" for field in FIELDS}
    names |= {f"{kind.__name__}.{name}" for kind, name, _ in PACKED}
    assert set(table) <= names  # type: ignore[call-overload]


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "a\0", "\u202e"])
def test_nothing_that_moves_a_cursor_comes_into_tables(value: str) -> None:
    with pytest.raises(ValueError, match=r"^hostname: .* cannot be printed"):
        bounds.check_bounds(pb.Register(hostname=value))
    with pytest.raises(ValueError, match=r"^reason: .* cannot be printed"):
        bounds.check_bounds(pb.DrainNodesRequest(reason=value))


def test_what_a_cluster_sends_is_far_within() -> None:
    message = pb.AgentMessage(
        incarnation="ab" * 8,
        records=pb.StepRecords(
            job_id="demo-1",
            records=[pb.StepRecord(step=n, loss=-0.5, time=1e9) for n in range(1, BATCH + 1)],
        ),
    )
    bounds.check_bounds(message)
    status = pb.NodeStatus(
        workers=[
            pb.WorkerStatus(slot=1023, committed_step=-1, peak_memory_bytes=1 << 50, card="c" * 60)
        ]
        * bounds.MOST_SLOTS
    )
    recorded = pb.Recorded(recording="x" * _PART_CHARACTERS)
    register = pb.Register(status=status, running=pb.Assignment(assign=bytes(400 << 10)))
    for large in (
        pb.AgentMessage(status=status),
        pb.AgentMessage(register=register),
        pb.AgentMessage(recorded=recorded),
        pb.SubmitRequest(job="x" * (400 << 10), profile="x" * (100 << 10)),
        pb.CodeChunk(data=bytes(bounds.PART_BYTES)),
    ):
        encoded = large.SerializeToString()
        assert bounds.SMALL_BYTES < len(encoded) <= bounds.MOST_RECEIVED_BYTES
        bounds.check_encoded(large.DESCRIPTOR, encoded)
        bounds.check_bounds(large)


def repeated(count: int) -> Message:
    return pb.AgentMessage(records=pb.StepRecords(records=[pb.StepRecord()] * count))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (repeated(1 << 16), "records: there are more than 1024 items"),
        (pb.NodeStatus(workers=[pb.WorkerStatus(doing="x" * 60)] * 1025), "workers: .* than 1024"),
        (pb.Assignment(worker_incarnations=["x" * 20] * 5000), "worker_incarnations: .* 4096"),
        (
            pb.AgentMessage(report=bytes(1 << 16), register=pb.Register(hostname="x" * (3 << 20))),
            "register: .* bytes are more",
        ),
    ],
)
def test_a_large_message_is_refused_before_it_is_parsed(message: Message, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        bounds.check_encoded(message.DESCRIPTOR, message.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        b"\xf8\x7f\x01" * 50_000,  # a field that nobody knows, again and again
        b"\x1a\x00" * 50_000,  # the same part again and again, which the parser would merge
        b"\x0b\x0c" * 50_000,  # a group, which has no length
        b"\x0a\xff\xff\xff\xff\x07" + bytes(1 << 17),  # longer than all there is
        b"\xff" * (1 << 17),
    ],
)
def test_bytes_that_are_no_message_are_refused_as_soon(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^(the message has more|the data are no message)"):
        bounds.check_encoded(pb.AgentMessage.DESCRIPTOR, data)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_counting(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        bounds.check_encoded(pb.AgentMessage.DESCRIPTOR, data + bytes(bounds.SMALL_BYTES))


def test_items_of_lists_have_no_messages_in_them() -> None:
    """So counting fields need not look into each of them."""
    for field in FIELDS:
        if field.is_repeated and field.message_type is not None:
            inner = [each for each in field.message_type.fields if each.message_type is not None]
            assert not inner, field.full_name

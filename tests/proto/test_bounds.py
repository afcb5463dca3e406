"""Every field of every message that a client may send has a bound."""

import math
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from oobleck.proto import bounds
from oobleck.proto import control_pb2 as pb
from oobleck.proto.convert import read_serialised_plan

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
        getattr(message, field.name).extend(
            [(field.message_type and GetMessageClass(field.message_type)()) or ""] * ((1 << 17) + 1)
        )
        with pytest.raises(ValueError, match=f"^{field.name}: .* items"):
            bounds.check_bounds(message)


def test_only_known_kinds_of_fields_come_in() -> None:
    """`check_bounds` has a case for each."""
    kinds = {field.cpp_type for field in FIELDS}
    text, message = FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE
    assert kinds <= {*WHOLE, *REAL, text, message, FieldDescriptor.CPPTYPE_BOOL}
    serialised = {str(f.full_name) for f in FIELDS if f.type == FieldDescriptor.TYPE_BYTES}
    assert serialised == {"oobleck.Assignment.plan"}


def test_what_is_serialised_in_a_message_has_bounds_too() -> None:
    stage = pb.Stage(workers=[pb.WorkerId(node="n1")])
    plan = pb.Plan(generation=1 << 63, pipelines=[pb.Pipeline(stages=[stage])], schedule="1f1b")
    with pytest.raises(ValueError, match=r"^plan: generation: .* above"):
        read_serialised_plan(plan.SerializeToString())


@pytest.mark.parametrize("table", [bounds._TEXTS, bounds._LINES, bounds._LISTS, bounds._SIGNED])
def test_the_tables_name_fields_that_there_are(table: object) -> None:
    assert set(table) <= {str(field.full_name) for field in FIELDS}  # type: ignore[call-overload]


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "a\0", "\u202e"])
def test_nothing_that_moves_a_cursor_comes_into_tables(value: str) -> None:
    with pytest.raises(ValueError, match=r"^hostname: .* cannot be printed"):
        bounds.check_bounds(pb.Register(hostname=value))
    with pytest.raises(ValueError, match=r"^reason: .* cannot be printed"):
        bounds.check_bounds(pb.DrainNodeRequest(reason=value))


def test_what_a_cluster_sends_is_far_within() -> None:
    message = pb.AgentMessage(
        incarnation="ab" * 8,
        records=pb.StepRecords(
            job_id="demo-1",
            records=[pb.StepRecord(step=n, loss=-0.5, time=1e9) for n in range(1, 65_537)],
        ),
    )
    bounds.check_bounds(message)
    status = pb.WorkerStatus(slot=1023, committed_step=-1, peak_memory_bytes=1 << 50)
    bounds.check_bounds(pb.NodeStatus(workers=[status] * 1024))

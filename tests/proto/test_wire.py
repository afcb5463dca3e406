"""Releases understand each other's messages and journals: nothing changes that one of before reads
otherwise, and a check that each such change is found."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from oobleck.proto import control_pb2 as pb
from support.wire import LOCK, problems, read, text_of, words, words_of, words_of_packed

Change = Callable[[FileDescriptorProto], object]


def test_nothing_is_said_that_a_release_of_before_reads_otherwise() -> None:
    before = read(LOCK.read_text())
    assert problems(before, words()) == []
    assert text_of(words()) == text_of(before), "run 'make proto-lock', and commit proto/wire.lock"


def after(change: Change) -> list[str]:
    """What is told of control.proto after a change of it."""
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    change(file)
    pool = DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    return problems(dict(words_of(pb.DESCRIPTOR)), dict(words_of(pool.FindFileByName(file.name))))


def message(file: FileDescriptorProto, name: str):  # type: ignore[no-untyped-def]
    return next(one for one in file.message_type if one.name == name)


def field(file: FileDescriptorProto, name: str) -> Field:
    owner, _, own = name.partition(".")
    return next(one for one in message(file, owner).field if one.name == own)


def without(file: FileDescriptorProto, name: str, *, reserve: bool = False) -> None:
    owner = message(file, name.partition(".")[0])
    gone = field(file, name)
    if reserve:
        owner.reserved_range.add(start=gone.number, end=gone.number + 1)
    owner.field.remove(gone)


def retyped(file: FileDescriptorProto, name: str, kind: int) -> None:
    field(file, name).type = kind  # type: ignore[assignment]


def other_message(file: FileDescriptorProto) -> None:
    field(file, "Welcome.detection").type_name = ".oobleck.Versions"


def without_method(file: FileDescriptorProto) -> None:
    methods = file.service[0].method
    methods.remove(methods[0])


def into_oneof(file: FileDescriptorProto) -> None:
    owner = message(file, "Holder")
    owner.oneof_decl.add(name="either")
    for one in owner.field:
        one.oneof_index = 0


def unreserved(file: FileDescriptorProto) -> None:
    del message(file, "AgentMessage").reserved_range[:]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: without(f, "Register.pid"), "Register 5 .* is gone: reserve its number"),
        (lambda f: setattr(field(f, "Register.pid"), "number", 77), "Register 5 .* is gone"),
        (lambda f: retyped(f, "Register.pid", Field.TYPE_STRING), "was uint32 .* is string"),
        (other_message, "was oobleck.Detection .* is oobleck.Versions"),
        (
            lambda f: setattr(field(f, "Register.node"), "label", Field.LABEL_REPEATED),
            "was string .* is list of string",
        ),
        (into_oneof, "was string as .* is string in either"),
        (unreserved, r"oobleck.AgentMessage 4 \(reserved\) is gone"),
        (without_method, r"Control/Session \(stream .*\) is gone"),
        (lambda f: setattr(f.service[0].method[0], "server_streaming", False), "-> MasterMessage"),
        (lambda f: setattr(f.service[0].method[0], "output_type", ".oobleck.Ack"), "-> stream Ack"),
    ],
)  # fmt: skip
def test_each_change_that_breaks_messages_is_found(change: Change, told: str) -> None:
    found = after(change)
    assert found
    assert all(re.search(told, line) for line in found[:1]), found


@pytest.mark.parametrize(
    "change",
    [
        lambda f: message(f, "Register").field.add(
            name="more", number=77, type=Field.TYPE_BOOL,
            label=Field.LABEL_OPTIONAL,
        ),
        lambda f: without(f, "Register.pid", reserve=True),
        lambda f: setattr(field(f, "Register.pid"), "name", "process"),
        lambda f: f.service[0].method.add(
            name="More", input_type=".oobleck.Ack", output_type=".oobleck.Ack"
        ),
    ],
)  # fmt: skip
def test_what_may_be_changed_is_let_through(change: Change) -> None:
    assert after(change) == []


@dataclass(frozen=True)
class Part:
    size: int = 0


class Whole(msgspec.Struct, tag="whole"):
    part: Part
    name: str = ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ([("part", Part), ("name", str, ""), ("more", int, 0)], ""),
        ([("part", Part)], ""),
        ([("part", Part), ("name", str, ""), ("more", int)], "Whole.more is needed"),
        ([("name", str, "")], r"Whole.part \(needed, Part\) is gone: keep it"),
        ([("part", Part), ("name", int, 0)], "Whole.name was may lack, str, and is may lack, int"),
        ([("part", Part), ("name", str)], "Whole.name was may lack"),
        ([("part", Part | None, None), ("name", str, "")], "Whole.part was needed, Part"),
    ],
)
def test_each_change_that_breaks_what_is_packed_is_found(fields, told: str) -> None:
    changed = msgspec.defstruct("Whole", fields, tag="whole", kw_only=True)
    found = problems(dict(words_of_packed((Whole,))), dict(words_of_packed((changed,))))
    if told:
        assert any(re.match(told, line) for line in found), found
    else:
        assert found == []


def test_a_tag_and_what_lies_below_count_too() -> None:
    other = msgspec.defstruct("Whole", [("part", Part), ("name", str, "")], tag="other")
    before = dict(words_of_packed((Whole,)))
    assert before["Part.size"] == "may lack, int"
    assert problems(before, dict(words_of_packed((other,)))) == [
        "Whole was tag whole, and is tag other: leave it, and add another"
    ]
    assert problems(before, {}) == [
        "Part.size (may lack, int) is gone: keep it",
        "Whole (tag whole) is gone: keep it",
        "Whole.name (may lack, str) is gone: keep it",
        "Whole.part (needed, Part) is gone: keep it",
    ]

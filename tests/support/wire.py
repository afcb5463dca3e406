"""What releases say to each other and leave in journals, held against what the last one did.

    cd tests && python -m support.wire

writes `proto/wire.lock` anew (`make proto-lock`): a line for every field of every message, every
call, and every field of what is carried packed or journaled. It refuses to where a release of
before would misread the new one, or the other way round, unless it is told `--intended`.

For messages and calls the rules are those of buf's category WIRE
(https://buf.build/docs/breaking/rules/), with types kept as they are and calls kept at all. Structs
travel as JSON by name: none may lose a field that others need, get one that others do not give, or
change what a field may be.
"""

import dataclasses
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from oobleck.core.messages import Assign, Measure
from oobleck.core.orders import Answer, Order
from oobleck.master.events.unions import Journaled
from oobleck.proto import control_pb2 as pb
from oobleck.proto.types import WorkerReport

LOCK = Path(__file__).parents[2] / "proto" / "wire.lock"
#: What stands in a message as text or bytes, or in the journal.
PACKED = (
    *(Assign, Measure, WorkerReport),
    *get_args(Order),
    *get_args(Answer),
    *get_args(Journaled),
)

#: By place: what is there, in words; the first words of a field's count.
Words = Mapping[str, str]
_RESERVED = "reserved"
_NEEDED, _MAY_LACK = "needed", "may lack"


# ---- messages and calls


def words_of(file: FileDescriptor) -> Iterator[tuple[str, str]]:
    for message in file.message_types_by_name.values():
        yield from _words_of_message(message)
    for service in file.services_by_name.values():
        for method in service.methods:
            ways = (
                (method.client_streaming, method.input_type),
                (
                    method.server_streaming,
                    method.output_type,
                ),
            )
            said = [f"{'stream ' if streams else ''}{kind.name}" for streams, kind in ways]
            yield f"{service.name}/{method.name}", " -> ".join(said)


def _words_of_message(message: Descriptor) -> Iterator[tuple[str, str]]:
    for field in message.fields:
        yield f"{message.full_name} {field.number}", f"{_kind(field)} as {field.name}"
    proto = DescriptorProto()
    message.CopyToProto(proto)
    for span in proto.reserved_range:
        for number in range(span.start, span.end):
            yield f"{message.full_name} {number}", _RESERVED
    for nested in message.nested_types:
        yield from _words_of_message(nested)


def _kind(field: FieldDescriptor) -> str:
    """Type, whether it is a list, and its oneof; whether an absent one can be told is no matter."""
    of = field.message_type or field.enum_type
    kind = of.full_name if of else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    oneof = field.containing_oneof
    # One field that may be absent stands in a oneof of its own, which protoc makes.
    within = f" in {oneof.name}" if oneof and not oneof.name.startswith("_") else ""
    return f"{'list of ' if field.is_repeated else ''}{kind}{within}"


# ---- Structs and dataclasses


def words_of_packed(kinds: tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    waiting: list[Any] = list(kinds)
    known: set[type] = set()
    while waiting:
        kind = waiting.pop(0)
        if kind in known or not isinstance(kind, type):
            waiting += [] if isinstance(kind, type) else get_args(kind)
            waiting += [kind.__supertype__] if hasattr(kind, "__supertype__") else []
            continue
        assert kind.__name__ not in {one.__name__ for one in known}, f"two kinds of {kind.__name__}"
        known.add(kind)
        if hasattr(kind, "from_tree"):  # one of several, told apart by what they hold
            # With slots a dataclass is made twice, and one of the two is nobody's.
            made = kind.__subclasses__()
            waiting += [
                one for one in made if vars(sys.modules[one.__module__])[one.__name__] is one
            ]
        for name, hint, needed in _fields(kind):
            waiting.append(hint)
            words = f"{_NEEDED if needed else _MAY_LACK}, {_shown(hint)}"
            yield f"{kind.__name__}.{name}", words
        if tag := getattr(getattr(kind, "__struct_config__", None), "tag", None):
            yield f"{kind.__name__}", f"tag {tag}"


def _fields(kind: Any) -> Iterator[tuple[str, Any, bool]]:
    """Name on the wire, type, and whether readers need it."""
    if issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield field.encode_name, field.type, field.required
    elif dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        for own in dataclasses.fields(kind):
            has_default = (own.default, own.default_factory) != (dataclasses.MISSING,) * 2
            yield own.name, hints[own.name], not has_default


def _shown(hint: Any) -> str:
    """In the same words whichever order typing keeps values and kinds in."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(sorted(map(str, arguments)))}"
    if origin in (Union, types.UnionType):
        return " | ".join(sorted(map(_shown, arguments)))
    if arguments:
        shown = ("..." if each is ... else _shown(each) for each in arguments)
        return f"{origin.__name__}[{', '.join(shown)}]"
    return "None" if hint is type(None) else str(getattr(hint, "__name__", hint))


# ---- both


def words() -> dict[str, str]:
    """Of this release."""
    return {**dict(words_of(pb.DESCRIPTOR)), **dict(words_of_packed(PACKED))}


def text_of(found: Words) -> str:
    return "".join(f"{place}: {what}\n" for place, what in sorted(found.items()))


def read(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def problems(before: Words, now: Words) -> list[str]:
    """What in `now` a release with `before` would misread, or the other way round."""
    found = []
    for place, was in before.items():
        is_now, owner = now.get(place), place.partition(".")[0]
        if is_now == was or (is_now == _RESERVED and " as " in was):
            continue
        if is_now is None:
            if was.startswith(_MAY_LACK) and any(key.startswith(f"{owner}.") for key in now):
                continue
            fix = "reserve its number" if " as " in was or was == _RESERVED else "keep it"
            found.append(f"{place} ({was}) is gone: {fix}")
        elif was.partition(" as ")[0] != is_now.partition(" as ")[0]:
            found.append(f"{place} was {was}, and is {is_now}: leave it, and add another")
    owners = {place.partition(".")[0] for place in before}
    found += [
        f"{place} is needed, and releases of before do not say it: give a default"
        for place in now.keys() - before.keys()
        if now[place].startswith(f"{_NEEDED},") and place.partition(".")[0] in owners
    ]
    return sorted(found)


def main() -> None:
    before, now = read(LOCK.read_text()) if LOCK.exists() else {}, words()
    found = problems(before, now)
    if found and "--intended" not in sys.argv[1:]:
        why = "see 'Compatibility between releases' in docs/contributing.md"
        sys.exit("\n".join([*found, f"proto/wire.lock is left as it was; {why}"]))
    LOCK.write_text(text_of(now))


if __name__ == "__main__":
    main()

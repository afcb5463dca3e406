"""Fields of messages: checks that several readers need, and copies to and from Structs.

A check raises ValueError that begins with the field's name. Fields with the same name in a Struct
and a message are copied; callers give those of another kind (messages in a message, empty for
None). Must not know the meaning of fields.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from oobleck.core.ids import Incarnation, JobId, check_name
from oobleck.proto.bounds import MOST_CHARACTERS, MOST_SLOTS

# ---- copies


S = TypeVar("S", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)


@lru_cache(maxsize=64)
def _shared(kind: type[msgspec.Struct], message: Descriptor) -> Iterable[tuple[str, bool]]:
    """Return the names of shared fields, and whether the message can lack the field."""
    both = [name for name in kind.__struct_fields__ if name in message.fields_by_name]
    descriptors = [message.fields_by_name[name] for name in both]
    return tuple(
        (field.name, field.has_presence) for field in descriptors if field.message_type is None
    )


def message_of(kind: type[M], value: msgspec.Struct, **others: Any) -> M:
    """Convert a Struct to a message. `others`: fields that are not plain copies of those of
    `value`."""
    names = _shared(type(value), kind.DESCRIPTOR)
    return kind(**{**{name: getattr(value, name) for name, _ in names}, **others})


def struct_of(kind: type[S], message: Message, **others: Any) -> S:
    """Convert a message to a Struct. `others`: fields that are not plain copies of those of
    `message`."""
    copies = {
        name: None if may_lack and not message.HasField(name) else getattr(message, name)
        for name, may_lack in _shared(kind, message.DESCRIPTOR)
    }
    return kind(**{**copies, **others})


_INCARNATION = re.compile(r"[0-9a-f]{4,64}")
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"\S{1,255}:[0-9]{1,5}")


@contextmanager
def in_field(name: str) -> Iterator[None]:
    """Name the field in a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def one_of(value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    return value


def at_least(value: int, minimum: int, field: str) -> int:
    if value < minimum:
        raise ValueError(f"{field}: {value} is below {minimum}")
    return value


def read_incarnation(text: str) -> Incarnation:
    if _INCARNATION.fullmatch(text) is None:
        raise ValueError(f"incarnation: {text[:80]!r} is not 4 to 64 lower-case hex digits")
    return Incarnation(text)


def read_job_id(text: str) -> JobId:
    with in_field("job_id"):
        return JobId(check_name(text, "job"))


def read_address(text: str, field: str) -> str:
    if _ADDRESS.fullmatch(text) is None:
        raise ValueError(f"{field}: {text!r} is not HOST:PORT")
    return text


def read_card(text: str, field: str) -> str:
    """Check a card: an address, preceded by an identity and an @ if it has one. Raises
    ValueError."""
    identity, _, address = text.rpartition("@")
    if identity and _IDENTITY.fullmatch(identity) is None:
        raise ValueError(f"{field}: {identity!r} is not 32 hexadecimal digits")
    read_address(address, field)
    return text


def read_slot(slot: int) -> int:
    if slot >= MOST_SLOTS:
        raise ValueError(f"slot: {slot} is not below {MOST_SLOTS}")
    return slot


def check_slot(slot: int, slots: int) -> None:
    """Check that `slot` is one of a node with `slots` workers. Raises ValueError."""
    if slot >= slots:
        raise ValueError(f"slot: {slot} is none of the node's, which has {slots}")


def ending(text: str) -> str:
    """Return as many of the last characters of `text` as a message may carry."""
    return text[-MOST_CHARACTERS:]

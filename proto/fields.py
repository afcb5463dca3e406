"""Conversion between Structs and messages: fields with the same name in both are copied.

Callers give fields of another kind (messages in a message, empty for None). Must not know the
meaning of fields.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

S = TypeVar("S", bound=msgspec.Struct)
M = TypeVar("M", bound=Message)


@lru_cache(maxsize=64)
def _shared(kind: type[msgspec.Struct], message: Descriptor) -> Iterable[tuple[str, bool]]:
    """Return the names of shared fields, and whether the message can lack the field."""
    both = [name for name in kind.__struct_fields__ if name in message.fields_by_name]
    found = [message.fields_by_name[name] for name in both]
    return tuple((field.name, field.has_presence) for field in found if field.message_type is None)


def message_of(kind: type[M], value: msgspec.Struct, **others: Any) -> M:
    """Convert a Struct to a message. `others`: fields that are not plain copies of those of
    `value`.
    """
    names = _shared(type(value), kind.DESCRIPTOR)
    return kind(**{**{name: getattr(value, name) for name, _ in names}, **others})


def struct_of(kind: type[S], message: Message, **others: Any) -> S:
    """Convert a message to a Struct. `others`: fields that are not plain copies of those of
    `message`.
    """
    found = {
        name: None if may_lack and not message.HasField(name) else getattr(message, name)
        for name, may_lack in _shared(kind, message.DESCRIPTOR)
    }
    return kind(**{**found, **others})

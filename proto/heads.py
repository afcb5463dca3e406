"""Conversion of a head's identity to messages and back."""

import re

from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import at_least, in_field
from oobleck.proto.fields import message_of, struct_of
from oobleck.proto.types import Head

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


def head_of(message: pb.Welcome | pb.Assignment, field: str = "head") -> Head | None:
    """Return the message's head; None if it names none. Raises ValueError."""
    if not message.HasField("head"):
        return None
    with in_field(field):
        return read_head(message.head)

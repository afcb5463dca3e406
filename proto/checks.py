"""Checks of single fields that several readers of messages need.

Each raises ValueError that begins with the field's name. Must not know messages.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oobleck.core.ids import Incarnation, JobId, check_name
from oobleck.proto.bounds import MOST_CHARACTERS, MOST_SLOTS

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
    ValueError.
    """
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

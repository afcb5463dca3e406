"""How much a message may hold, whatever it says: checked before anything of it is looked at.

Every number has a sign and an end, every text and list a length, also in the data that a message
carries packed. The tables name a field by the type that it stands in. Bounds lie far above what a
cluster sends, so what breaks one is damage or malice. Must not know what the fields mean.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import msgspec
from google.protobuf.message import Message

from oobleck.planner.ids import WorkerId, check_name

#: Of a text.
MOST_CHARACTERS = 64 << 10
#: Of a text that names or describes one thing, in a line.
MOST_LINE = 1024
#: Of a list.
MOST_ITEMS = 4096
#: Of a whole number: what a file of JSON can hold for every reader.
MOST_NUMBER = (1 << 63) - 1

#: No host has more workers.
MOST_SLOTS = 1024
#: Of bytes: that of the whole message.
MOST_BYTES = 16 << 20

_TEXTS: Mapping[str, int] = {
    "Recorded.recording": MOST_BYTES,
    # Told with a better reason by their readers.
    "SubmitRequest.job": MOST_BYTES,
    "SubmitRequest.profile": MOST_BYTES,
    "JoinRequest.request": MOST_BYTES,
}
#: Stand in tables and logs, so nothing that moves a cursor is in them.
_LINES = frozenset(
    {
        "Register.hostname",
        "Register.address",
        "Register.device_kind",
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
        "StepRecord.samples_digest",
        "ClockRead.boot",
        "DrainNodeRequest.reason",
    }
)
_LISTS: Mapping[str, int] = {
    "StepRecords.records": 1 << 17,
    # Of all workers of a cluster.
    "Assign.leaving": 1 << 17,
    "PeerLost.unreached": 1 << 17,
}
#: Of numbers that may be below zero.
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


def check_bounds(value: object) -> None:
    """All that a message, a Struct or a dataclass holds. Raises ValueError that names the field."""
    if isinstance(value, Message):
        message = value.DESCRIPTOR.name
        for field, inner in value.ListFields():
            _check(f"{message}.{field.name}", list(inner) if field.is_repeated else inner)
        return
    kind: Any = type(value)
    for name, key in _fields(kind):
        _check(key, getattr(value, name))


@cache
def _fields(kind: type) -> tuple[tuple[str, str], ...]:
    """Names and keys in the tables of what a Struct or dataclass holds."""
    if issubclass(kind, msgspec.Struct):
        names: Iterable[str] = kind.__struct_fields__
    elif is_dataclass(kind):
        names = [field.name for field in fields(kind)]
    else:
        raise TypeError(f"there is no bound for {kind.__name__}")
    return tuple((name, f"{kind.__name__}.{name}") for name in names)


def _check(key: str, value: object) -> None:
    """`key`: the type that the value stands in, and the field."""
    match value:
        case str():
            _check_text(key, value)
        case None | bool():
            pass
        case int() | float():
            _check_number(key, value)
        case bytes():  # of what is looked at when it is read
            if len(value) > MOST_BYTES:
                raise _wrong(key, f"{len(value)} bytes are more than {MOST_BYTES}")
        case WorkerId():
            _check_worker(value)
        case tuple() | list() | dict():
            if len(value) > (most := _LISTS.get(key, MOST_ITEMS)):
                raise _wrong(key, f"{len(value)} items are more than {most}")
            for item in (*value, *value.values()) if isinstance(value, dict) else value:
                _check(key, item)
        case _:
            check_bounds(value)


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

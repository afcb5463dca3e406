"""How much a message may hold, whatever it says: checked before anything of it is looked at.

Every number has a sign and an end, every text and list a length, also in the data that a message
carries packed. The tables name a field by the type that it stands in. Bounds lie far above what a
cluster sends, so what breaks one is damage or malice. Must not know what the fields mean.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass

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
        "WorkerStatus.store",
        "WorkerStatus.data",
        "WorkerStatus.doing",
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
    kind, found = _fields_of(value)
    for name, inner in found:
        _check(kind, name, inner)


def _fields_of(value: object) -> tuple[str, Iterable[tuple[str, object]]]:
    """The name of its type, and its fields."""
    match value:
        case Message():
            return value.DESCRIPTOR.name, [(field.name, each) for field, each in value.ListFields()]
        case msgspec.Struct():
            names: Iterable[str] = value.__struct_fields__
        case _ if is_dataclass(value):
            names = [field.name for field in fields(value)]
        case _:
            raise TypeError(f"there is no bound for {type(value).__name__}")
    return type(value).__name__, [(name, getattr(value, name)) for name in names]


def _check(kind: str, name: str, value: object) -> None:
    match value:
        case str():
            _check_text(f"{kind}.{name}", name, value)
        case None | bool():
            pass
        case int() | float():
            if isinstance(value, int) and abs(value) > MOST_NUMBER:
                raise ValueError(f"{name}: the number is above {MOST_NUMBER}")
            if not math.isfinite(value):
                raise ValueError(f"{name}: {value} is not a number")
            if value < 0 and f"{kind}.{name}" not in _SIGNED:
                raise ValueError(f"{name}: {value} is below 0")
        case bytes():  # of what is looked at when it is read
            if len(value) > MOST_BYTES:
                raise ValueError(f"{name}: {len(value)} bytes are more than {MOST_BYTES}")
        case WorkerId():
            _check_worker(value)
        case Sequence() | Mapping():
            if len(value) > (most := _LISTS.get(f"{kind}.{name}", MOST_ITEMS)):
                raise ValueError(f"{name}: {len(value)} items are more than {most}")
            items = (*value, *value.values()) if isinstance(value, Mapping) else value
            for item in items:
                _check(kind, name, item)
        case _:
            check_bounds(value)


def _check_worker(worker: WorkerId) -> None:
    check_name(worker.node, "node")
    if not 0 <= worker.slot < MOST_SLOTS:
        raise ValueError(f"slot: {worker.slot} is not below {MOST_SLOTS}")


def _check_text(key: str, name: str, text: str) -> None:
    line = key in _LINES
    most = MOST_LINE if line else _TEXTS.get(key, MOST_CHARACTERS)
    if len(text) > most:
        raise ValueError(f"{name}: {len(text)} characters are more than {most}")
    if line and not text.isprintable():
        raise ValueError(f"{name}: {text[:80]!r} has characters that cannot be printed")

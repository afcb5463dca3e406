"""How much a message may hold, whatever it says: checked before anything of it is looked at.

Every number has a sign and an end, every text and list a length. Bounds lie far above what a
cluster sends, so what breaks one is damage or malice. Must not know what the fields mean.
"""

import math
from collections.abc import Mapping

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

#: Of a text.
MOST_CHARACTERS = 64 << 10
#: Of a text that names or describes one thing, in a line.
MOST_LINE = 1024
#: Of a list.
MOST_ITEMS = 4096
#: Of a whole number: what a file of JSON can hold for every reader.
MOST_NUMBER = (1 << 63) - 1

_UNBOUND = 16 << 20  # that of the whole message
_TEXTS: Mapping[str, int] = {
    "oobleck.Measured.measurement": _UNBOUND,
    "oobleck.Recorded.recording": _UNBOUND,
    # Told with a better reason by their readers.
    "oobleck.SubmitRequest.job": _UNBOUND,
    "oobleck.SubmitRequest.profile": _UNBOUND,
    "oobleck.JoinRequest.request": _UNBOUND,
}
#: Stand in tables and logs, so nothing that moves a cursor is in them.
_LINES = frozenset(
    {
        "oobleck.Register.hostname",
        "oobleck.Register.address",
        "oobleck.Register.device_kind",
        "oobleck.Versions.oobleck",
        "oobleck.Versions.python",
        "oobleck.Versions.torch",
        "oobleck.Versions.transformers",
        "oobleck.WorkerStatus.store",
        "oobleck.WorkerStatus.data",
        "oobleck.WorkerStatus.doing",
        "oobleck.CheckpointSaved.path",
        "oobleck.Restored.path",
        "oobleck.StepRecord.samples_digest",
        "oobleck.ClockRead.boot",
        "oobleck.DrainNodeRequest.reason",
    }
)
_LISTS: Mapping[str, int] = {
    "oobleck.StepRecords.records": 1 << 17,
}
#: Of numbers that may be below zero.
_SIGNED = frozenset(
    {
        "oobleck.Evaluation.loss",
        "oobleck.StepRecord.loss",
        "oobleck.WorkerStatus.committed_step",
        "oobleck.PhaseReached.committed_step",
        "oobleck.WorkerExited.exit_code",
        "oobleck.PeerLost.step",
        "oobleck.ClockRead.monotonic_ns",
    }
)


def check_bounds(message: Message) -> None:
    """Raises ValueError that names the field."""
    for field, value in message.ListFields():
        if field.is_repeated:
            most = _LISTS.get(field.full_name, MOST_ITEMS)
            if len(value) > most:
                raise ValueError(f"{field.name}: {len(value)} items are more than {most}")
            for item in value:
                _check(field, item)
        else:
            _check(field, value)


def _check(field: FieldDescriptor, value: object) -> None:
    match value:
        case Message():
            check_bounds(value)
        case str():
            _check_text(field, value)
        case bool():
            pass
        case bytes():  # of a message that is looked at when it is read
            if len(value) > _UNBOUND:
                raise ValueError(f"{field.name}: {len(value)} bytes are more than {_UNBOUND}")
        case int() | float():
            if not math.isfinite(value):
                raise ValueError(f"{field.name}: {value} is not a number")
            if value < 0 and field.full_name not in _SIGNED:
                raise ValueError(f"{field.name}: {value} is below 0")
            if abs(value) > MOST_NUMBER and isinstance(value, int):
                raise ValueError(f"{field.name}: {value} is above {MOST_NUMBER}")
        case _:
            raise TypeError(f"{field.full_name}: there is no bound for {type(value).__name__}")


def _check_text(field: FieldDescriptor, text: str) -> None:
    line = field.full_name in _LINES
    most = MOST_LINE if line else _TEXTS.get(field.full_name, MOST_CHARACTERS)
    if len(text) > most:
        raise ValueError(f"{field.name}: {len(text)} characters are more than {most}")
    if line and not text.isprintable():
        raise ValueError(f"{field.name}: {text[:80]!r} has characters that cannot be printed")

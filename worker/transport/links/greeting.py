"""How the two ends of a new link prove to each other that they belong to the same meeting.

Whoever calls says who it is and which meeting it means; both then prove, each over the other's
fresh bytes, that they know that meeting's secret, and the one that was called ends with a word of
welcome, before which the caller sends nothing. All messages have a fixed size. Must not know
sockets, nor who is welcome.
"""

import hmac
import secrets
import struct
from typing import NamedTuple

#: Of a process that has links: random, new for each.
IDENTITY_BYTES = 16
_FRESH_BYTES = 32
_PROOF_BYTES = 32
_MAGIC = b"oobl\x01"

_CALL = struct.Struct(f"!{len(_MAGIC)}sQI{IDENTITY_BYTES}s{_FRESH_BYTES}s")
CALL_BYTES = _CALL.size + _PROOF_BYTES
ANSWER_BYTES = _FRESH_BYTES + _PROOF_BYTES
CONFIRM_BYTES = _PROOF_BYTES
WELCOME = b"w"


def fresh() -> bytes:
    return secrets.token_bytes(_FRESH_BYTES)


class Call(NamedTuple):
    """What a caller says. Not proven until the confirmation is."""

    epoch: int
    #: Counts the links between the two processes: the newer replaces the older.
    serial: int
    caller: bytes
    fresh: bytes
    #: All of the above as it was said, and the proof behind it.
    said: bytes
    proof: bytes


def make_call(epoch: int, serial: int, caller: bytes, own: bytes) -> bytes:
    """All but the proof; `own` is fresh."""
    return _CALL.pack(_MAGIC, epoch, serial, caller, own)


def read_call(message: bytes) -> Call | None:
    """None: whoever calls speaks something else."""
    said, proof = message[: _CALL.size], message[_CALL.size :]
    magic, epoch, serial, caller, theirs = _CALL.unpack(said)
    return Call(epoch, serial, caller, theirs, said, proof) if magic == _MAGIC else None


def read_answer(message: bytes) -> tuple[bytes, bytes]:
    """The other end's fresh bytes, and the proof."""
    return message[:_FRESH_BYTES], message[_FRESH_BYTES:]


def prove(secret: bytes, step: bytes, called: bytes, *said: bytes) -> bytes:
    """That whoever says it knows `secret`. `called`: identity of the process that was called, so
    that nobody can hand the greeting on to another; `said`: all parts have fixed sizes."""
    return hmac.digest(secret, b"".join((step, called, *said)), "sha256")


def proven(proof: bytes, secret: bytes, step: bytes, called: bytes, *said: bytes) -> bool:
    return hmac.compare_digest(proof, prove(secret, step, called, *said))

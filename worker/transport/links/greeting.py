"""Handshake in which the ends of a new link prove to each other that they belong to the same
meeting.

The caller sends its identity and its meeting. Both then prove, each over the other's fresh key,
that they know that meeting's secret. The called end finishes with a word of welcome, before which
the caller sends nothing. The traffic keys derive from both fresh keys and the secret. All messages
have a fixed size. Must not know sockets, nor the members.
"""

import hmac
import struct
from typing import NamedTuple

# Loaded now: later, with the first key, it would fail in a process without a free descriptor.
import cryptography.hazmat.backends.openssl.backend  # noqa: F401
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

# ---- Seals of a link's traffic, so that a third party can neither read it nor change it
# unnoticed.
#
# AES-128-GCM; each direction has a key of its own and counts its pieces, so a piece that is
# changed, omitted, repeated or moved does not open.


#: Bytes of the key from which a direction's keys derive.
KEY_BYTES = 32
#: Bytes that sealing adds to a piece.
TAG_BYTES = 16
_AES_BYTES = 16
_NONCE = struct.Struct("!4xQ")
#: Pieces per key. In pieces of 256 KiB that is 256 GiB, below the limit of RFC 8446 §5.5 for a key.
_PIECES_PER_KEY = 1 << 20


class Seal:
    """Seal for one direction of one link, at one of its ends."""

    def __init__(self, key: bytes) -> None:
        self._next_key = key
        self._count = 0
        self._broken = False
        self._renew()

    def _renew(self) -> None:
        """Renew the key. A later key does not reveal an earlier one."""
        self._aes = AESGCM(hmac.digest(self._next_key, b"seal", "sha256")[:_AES_BYTES])
        self._next_key = hmac.digest(self._next_key, b"next", "sha256")

    def _nonce(self) -> bytes:
        """Return the next nonce, never the same twice with one key."""
        if self._count and self._count % _PIECES_PER_KEY == 0:
            self._renew()
        nonce = _NONCE.pack(self._count)
        self._count += 1
        return nonce

    def close(self, piece: memoryview, room: memoryview) -> None:
        """Seal `piece` into `room`, which is longer by a tag."""
        self._aes.encrypt_into(self._nonce(), piece, None, room)

    def open(self, sealed: memoryview, room: memoryview) -> None:
        """Open the next piece into `room`. Raises ConnectionError where it is not what the other
        end sealed; then `room` is invalid, and nothing opens any more."""
        try:
            if not self._broken:
                self._aes.decrypt_into(self._nonce(), sealed, None, room)
                return
        except InvalidTag:
            self._broken = True
        raise ConnectionError("data of a link was changed on its way")


class Seals(NamedTuple):
    """Seals for both directions, as one end has them."""

    outward: Seal
    inward: Seal


#: Bytes of a process's identity for links, which is random and unique.
IDENTITY_BYTES = 16
_PUBLIC_BYTES = 32
PROOF_BYTES = 32
_PLACE_BYTES = 32
_MAGIC = b"oobl\x03"

_CALL = struct.Struct(f"!{len(_MAGIC)}sQI?{IDENTITY_BYTES}s{_PLACE_BYTES}s{_PUBLIC_BYTES}s")
_ANSWER = struct.Struct(f"!?{_PUBLIC_BYTES}s")
CALL_BYTES = _CALL.size + PROOF_BYTES
ANSWER_BYTES = _ANSWER.size + PROOF_BYTES
CONFIRM_BYTES = PROOF_BYTES
WELCOME = b"w"


def fresh() -> X25519PrivateKey:
    return X25519PrivateKey.generate()


class Call(NamedTuple):
    """Words of a caller. They are unproven until the confirmation."""

    epoch: int
    #: Number of the link between the two processes: a newer one replaces an older one.
    serial: int
    #: True if the caller wants the link sealed. It is if either end wants that, so that none gets
    #: less than it wants.
    seals: bool
    caller: bytes
    #: Digest of the caller's card.
    place: bytes
    public: bytes
    #: All of the above as sent, followed by the proof.
    packed: bytes
    proof: bytes


class Answer(NamedTuple):
    """Words of the called end."""

    seals: bool
    public: bytes
    packed: bytes
    proof: bytes


def make_call(
    epoch: int, serial: int, seals: bool, caller: bytes, place: bytes, own: X25519PrivateKey
) -> bytes:
    """Pack a call without its proof; `own` is fresh."""
    public = own.public_key().public_bytes_raw()
    return _CALL.pack(_MAGIC, epoch, serial, seals, caller, place, public)


def read_call(message: bytes) -> Call | None:
    """Parse a call. Return None where the caller uses another protocol."""
    packed, proof = message[: _CALL.size], message[_CALL.size :]
    magic, epoch, serial, seals, caller, place, public = _CALL.unpack(packed)
    if magic != _MAGIC:
        return None
    return Call(epoch, serial, seals, caller, place, public, packed, proof)


def make_answer(seals: bool, own: X25519PrivateKey) -> bytes:
    """Pack an answer without its proof; `own` is fresh."""
    return _ANSWER.pack(seals, own.public_key().public_bytes_raw())


def read_answer(message: bytes) -> Answer:
    packed, proof = message[: _ANSWER.size], message[_ANSWER.size :]
    seals, public = _ANSWER.unpack(packed)
    return Answer(seals, public, packed, proof)


def prove(secret: bytes, step: bytes, called: bytes, *packed: bytes) -> bytes:
    """Prove that the sender knows `secret`. `called`: digest of the called identity and address, so
    that the greeting cannot be forwarded to another; `packed`: all parts have fixed sizes."""
    return hmac.digest(secret, b"".join((step, called, *packed)), "sha256")


def proven(proof: bytes, secret: bytes, step: bytes, called: bytes, *packed: bytes) -> bool:
    return hmac.compare_digest(proof, prove(secret, step, called, *packed))


def prove_member(secret: bytes, epoch: int, of: bytes, to: bytes, word: bytes = b"") -> bytes:
    """Prove, over a link from before a meeting, that this process has that meeting's secret. `of`,
    `to`: identities; `word`: its word there."""
    return prove(secret, b"member", to, of, epoch.to_bytes(8, "big"), word)


def seals_of_caller(
    own: X25519PrivateKey, theirs: bytes, secret: bytes, called: bytes, *packed: bytes
) -> Seals:
    """Return the caller's seals. `theirs`: the other end's fresh key; the rest as for `prove`.

    Only the two ends can know these, even if the secret becomes known later. Raises
    PermissionError.
    """
    outward, inward = _keys(own, theirs, secret, called, *packed)
    return Seals(Seal(outward), Seal(inward))


def seals_of_called(
    own: X25519PrivateKey, theirs: bytes, secret: bytes, called: bytes, *packed: bytes
) -> Seals:
    """Return the same seals at the other end."""
    inward, outward = _keys(own, theirs, secret, called, *packed)
    return Seals(Seal(outward), Seal(inward))


def _keys(
    own: X25519PrivateKey, theirs: bytes, secret: bytes, called: bytes, *packed: bytes
) -> tuple[bytes, bytes]:
    """Derive two keys: one for the caller's sends, one for its receives."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:
        raise PermissionError("the other end's key is invalid") from None
    info = b"".join((b"oobleck link", called, *packed))
    both = HKDF(SHA256(), 2 * KEY_BYTES, salt=secret, info=info).derive(shared)
    return both[:KEY_BYTES], both[KEY_BYTES:]

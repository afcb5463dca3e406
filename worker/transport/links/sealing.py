"""Seals of a link's traffic, so that a third party can neither read it nor change it unnoticed.

AES-128-GCM; each direction has a key of its own and counts its pieces, so a piece that is changed,
omitted, repeated or moved does not open. Must not know sockets, nor the meaning of pieces.
"""

import hmac
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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

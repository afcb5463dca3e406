"""Card of a process: its address and identity, by which others call it."""

from hashlib import sha256
from ipaddress import ip_address
from typing import NamedTuple

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.greeting import IDENTITY_BYTES


class Card(NamedTuple):
    """Address at which a process listens, and its identity."""

    identity: bytes
    host: str
    port: int

    @property
    def text(self) -> str:
        return f"{self.identity.hex()}@{self.host}:{self.port}"

    @property
    def digest(self) -> bytes:
        """Digest of the called identity and address, for the proofs of both ends."""
        return sha256(self.text.encode()).digest()

    @classmethod
    def read(cls, text: str) -> "Card":
        """Parse a card. Raises TransportError: a card from another process may be invalid."""
        identity, _, place = text.partition("@")
        host, _, port = place.rpartition(":")
        try:
            ip_address(host)  # resolving a name would take time
            card = cls(bytes.fromhex(identity), host, int(port))
        except ValueError as error:
            raise TransportError(f"the card {text!r} cannot be read: {error}") from None
        if len(card.identity) != IDENTITY_BYTES or not 0 < card.port < 1 << 16:
            raise TransportError(
                f"the card {text!r} cannot be read: its identity or port is invalid"
            )
        return card

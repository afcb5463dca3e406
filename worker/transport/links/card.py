"""What a process tells the others so that they can call it: where it listens, and who it is."""

from hashlib import sha256
from typing import NamedTuple


class Card(NamedTuple):
    """Where a process listens, and who it is."""

    identity: bytes
    host: str
    port: int

    @property
    def text(self) -> str:
        return f"{self.identity.hex()}@{self.host}:{self.port}"

    @property
    def digest(self) -> bytes:
        """In the proofs of both ends: who is called, and where."""
        return sha256(self.text.encode()).digest()

    @classmethod
    def read(cls, text: str) -> "Card":
        """Raises ValueError."""
        identity, _, place = text.partition("@")
        host, _, port = place.rpartition(":")
        return cls(bytes.fromhex(identity), host, int(port))

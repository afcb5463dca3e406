"""Each worker tells all others one message, and hears theirs. Must not know what they say."""

from typing import TypeVar

from oobleck.core.codec import decode, encode
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.transport import Transport

T = TypeVar("T")


def tell_all(transport: Transport, message: T, kind: type[T]) -> list[T]:
    """Return the messages of all, by rank. Raises TransportError, also where what came is no
    message."""
    told: list[T] = []
    for rank, text in enumerate(transport.gather(encode(message))):
        try:
            told.append(decode(kind, text))
        except ValueError as error:
            raise TransportError(f"what came from rank {rank} is {error}") from error
    return told

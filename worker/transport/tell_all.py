"""Exchange of one message from each worker to all others. Must not know their meaning."""

from typing import TypeVar

from oobleck.core.codec import decode, encode
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.transport import Transport

T = TypeVar("T")


def tell_all(transport: Transport, message: T, kind: type[T]) -> list[T]:
    """Return the messages of all, by rank. Raises TransportError, also for an invalid message."""
    told: list[T] = []
    for rank, text in enumerate(transport.gather(encode(message))):
        try:
            told.append(decode(kind, text))
        except ValueError as error:
            raise TransportError(f"the message of rank {rank} is {error}") from error
    return told

"""Each worker tells all others one message, and hears theirs. Must not know what they say."""

from typing import TypeVar

import torch

from oobleck.planner.codec import decode, encode
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.transport import Transport

T = TypeVar("T")


def tell_all(transport: Transport, message: T, kind: type[T], most_bytes: int) -> list[T]:
    """Everyone's message, by rank. All have room for `most_bytes` of its JSON text, so that one
    gather is enough. Raises TransportError, also where what came is no message."""
    text = encode(message)
    assert len(text) <= most_bytes, f"a message of {len(text)} bytes, and room for {most_bytes}"
    padded = bytearray(text.ljust(most_bytes))
    told: list[T] = []
    for rank, row in enumerate(transport.all_gather(torch.frombuffer(padded, dtype=torch.uint8))):
        try:
            told.append(decode(kind, bytes(row.numpy())))
        except ValueError as error:
            raise TransportError(f"what came from rank {rank} is {error}") from error
    return told

"""Streams of torch's pool in which communicators run, no two in the same.

torch hands out the streams of a pool in turn and begins again with the first
(c10/cuda/CUDAStream.h, "Stream pool note"), even if it is still in use. Kept communicators stay on
theirs while others come and go. So before one is made, this module takes streams from the pool
until the next one is free. Must not know the work in a stream.
"""

from collections.abc import Callable

from oobleck.worker.runtime.errors import InvariantViolation


class StreamRing:
    """Ring of the pool's streams, and which of them are held. Used by one thread at a time, while
    no other thread takes streams of the pool."""

    def __init__(self, take: Callable[[], int]) -> None:
        """Make the ring. `take`: takes the pool's next stream and returns it."""
        self._take = take
        #: In the order in which they are handed out.
        self._ring: list[int] = []
        self._held: set[int] = set()

    def hold_next(self) -> int:
        """Make the pool's next stream one that is not held, hold it from now on, and return it.
        Raises InvariantViolation where all are held."""
        taken = self._take()
        if not self._ring:
            while taken not in self._ring:
                self._ring.append(taken)
                taken = self._take()
        for _ in self._ring:
            following = self._ring[(self._ring.index(taken) + 1) % len(self._ring)]
            if following not in self._held:
                self._held.add(following)
                return following
            taken = self._take()
        raise InvariantViolation(f"{len(self._held)} communicators have a stream of their own each")

    def let_go(self, stream: int) -> None:
        self._held.discard(stream)

"""The host's time of what is queued on a device, where that is done later than it is queued.

Marks are events of the device. How long they are behind the first one, the device says; when the
first one was, the host, which waits for it. One thread uses it.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Mark = TypeVar("Mark")


class DeviceClock(Generic[Mark]):
    def __init__(
        self,
        mark: Callable[[], Mark],
        between: Callable[[Mark, Mark], float],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`mark`: queues one; `between`: seconds from one to another, once both are past."""
        self.mark = mark
        self._between = between
        self._now_ns = now_ns
        self._first: Mark | None = None
        self._first_ns = 0

    def begin(self) -> None:
        """Begin the clock: marks come from here on. Waits for what is queued."""
        self._first = self.mark()
        self._between(self._first, self._first)
        self._first_ns = self._now_ns()

    def at_ns(self, mark: Mark) -> int:
        """Return the mark's time in ns on the host's monotonic clock. Waits until the mark is
        past."""
        assert self._first is not None, "it has begun"
        return self._first_ns + round(1e9 * self._between(self._first, mark))


def clock_of(device: torch.device) -> DeviceClock[torch.cuda.Event] | None:
    """Return the device's clock; None for a device that computes synchronously."""
    return DeviceClock(_event, _between) if device.type == "cuda" else None


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record()
    return event


def _between(one: torch.cuda.Event, other: torch.cuda.Event) -> float:
    other.synchronize()
    return float(one.elapsed_time(other)) / 1e3

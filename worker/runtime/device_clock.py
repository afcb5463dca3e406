"""Host times of work that is queued on a device, where it runs later than it is queued.

Marks are events of the device. The device measures their distance from the first mark; the host
waits for the first one and takes its time. One thread uses it.
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
        """Make a clock. `mark`: queues a mark; `between`: seconds from one mark to another, once
        both have passed.
        """
        self.mark = mark
        self._between = between
        self._now_ns = now_ns
        self._first: Mark | None = None
        self._first_ns = 0

    def begin(self) -> None:
        """Begin the clock, before any other mark. Waits for queued work."""
        self._first = self.mark()
        self._between(self._first, self._first)
        self._first_ns = self._now_ns()

    def at_ns(self, mark: Mark) -> int:
        """Return the mark's time in ns on the host's monotonic clock. Waits until the mark has
        passed."""
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

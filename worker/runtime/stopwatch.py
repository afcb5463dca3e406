"""Compute time of a worker in a step, without its waits.

On a CPU it uses the wall clock, so that a throttled or shared core shows. On a GPU it uses events
in the queue, which are read at the end of the step. They also keep the host from queueing a whole
step, whose progress could not be seen. One thread uses it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: Moment: seconds, or an event of the device.
_Mark = float | torch.cuda.Event
#: Most spans that a GPU may have queued and not begun: forwards and backwards, or parts of them
#: where a stage is shared.
AHEAD = 4


class Stopwatch:
    """Stopwatch of one worker, step after step."""

    def __init__(
        self, mark: Callable[[], _Mark], wait: Callable[[_Mark], None] = lambda mark: None
    ) -> None:
        """Make a stopwatch. `mark`: returns the present moment; `wait`: waits until that moment has
        passed, on a device where work is only queued."""
        self._mark = mark
        self._wait = wait
        #: Begin and end of each computed span of the step.
        self._spans: list[tuple[_Mark, _Mark]] = []
        #: None: no compute is running.
        self._began: _Mark | None = None

    @classmethod
    def on(cls, device: torch.device) -> "Stopwatch":
        return cls(_event, _passed) if device.type == "cuda" else cls(time.monotonic)

    def begin(self) -> None:
        """Begin a step. The previous one may have been left in the middle."""
        self._spans.clear()
        self._began = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside as computation."""
        self._began = self._mark()
        yield
        self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside from computation."""
        if self._began is None:
            yield
            return
        self._stop()
        yield
        self._began = self._mark()

    def _stop(self) -> None:
        assert self._began is not None, "it runs"
        self._spans.append((self._began, self._mark()))
        self._began = None
        if len(self._spans) > AHEAD:
            self._wait(self._spans[-AHEAD - 1][0])

    def seconds(self) -> float:
        """Return the seconds of the step, whose computation is over."""
        return sum(_between(began, ended) for began, ended in self._spans)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
    event.record()
    return event


def _passed(mark: _Mark) -> None:
    assert isinstance(mark, torch.cuda.Event), "a GPU's moments are events"
    mark.synchronize()


def _between(began: _Mark, ended: _Mark) -> float:
    if isinstance(began, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event), "marks of a step are of one kind"
        ended.synchronize()  # the step's vote has waited for it already
        return float(began.elapsed_time(ended)) / 1e3
    assert isinstance(ended, float), "marks of a step are of one kind"
    return ended - began

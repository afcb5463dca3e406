"""Measures how long a worker computes in a step, without its waits.

On a CPU it uses the wall clock, so that a throttled or shared core shows. On a GPU it uses events
between what is queued there, which are read when the step is over. They also keep the host from
queueing a whole step, whose progress could not be seen. One thread uses it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: A moment: seconds, or an event of the device.
_Mark = float | torch.cuda.Event
#: A GPU has begun with all that was queued but so many spans: forwards and backwards, or parts of
#: them where a stage is shared.
AHEAD = 4


class Stopwatch:
    """Stopwatch of one worker, step after step."""

    def __init__(
        self, mark: Callable[[], _Mark], wait: Callable[[_Mark], None] = lambda mark: None
    ) -> None:
        """`mark`: gives the moment that it is called at; `wait`: until that moment is past, where
        what is done is only queued when it is called."""
        self._mark = mark
        self._wait = wait
        #: Begin and end of everything that was computed in the step.
        self._spans: list[tuple[_Mark, _Mark]] = []
        #: None: nothing is computed.
        self._began: _Mark | None = None

    @classmethod
    def on(cls, device: torch.device) -> "Stopwatch":
        return cls(_event, _passed) if device.type == "cuda" else cls(time.monotonic)

    def begin(self) -> None:
        """Begin a step. The one before may have been left in the middle."""
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
        """But for what is done inside of this."""
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

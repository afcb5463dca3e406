"""Time of a worker: spans of the steps that it was asked to record, and its compute time.

While nothing is recorded, a span costs two calls and a comparison; the pulse is updated in any
case. The phases of the last way into a generation are always kept. A single thread makes all spans,
so they are adjacent or nested; sums run beside them. Work queued on a GPU runs later, so a span of
computation is recorded a second time, as the GPU's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from oobleck.core.ids import Generation
from oobleck.core.messages import Category, Record, Recorded, Recording, Span
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.device import DeviceClock, has_queue, moment, seconds_between

_OFF: AbstractContextManager[None] = nullcontext()


class OpenSpan(AbstractContextManager[None]):
    """Span that has begun and not ended."""

    __slots__ = ("_category", "_name", "_spans", "_started_ns")

    def __init__(self, spans: list[Span], name: str, category: Category) -> None:
        self._spans = spans
        self._name = name
        self._category: Category = category
        self._started_ns = time.monotonic_ns()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        ended_ns = time.monotonic_ns()
        self._spans.append(
            Span(self._name, self._category, self._started_ns, ended_ns - self._started_ns)
        )


class Timeline:
    """Recording of one worker."""

    def __init__(self, clock: DeviceClock[Any] | None = None) -> None:
        """Make a recording. `clock`: the device's, if the device has one of its own."""
        self._clock = clock
        #: Names of device computations, with the marks of their begin and end.
        self._marked: list[tuple[str, Any, Any]] = []
        self._generation = Generation(0)
        self._phases: list[Span] = []
        #: True if a step has been committed since the worker last left a generation.
        self._stepped = False
        self._steps: list[int] = []
        #: None: no recording is in progress.
        self._spans: list[Span] | None = None

    def leave(self) -> None:
        """Begin the way from one generation to the next, and drop an unfinished recording."""
        self._spans = None
        if self._stepped:
            self._phases, self._stepped = [], False

    def enter(self, generation: Generation) -> None:
        self._generation = generation

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Record a phase of the way into the generation."""
        pulse.beat(name)
        return OpenSpan(self._phases, name, "recovery")

    def first_step(self) -> AbstractContextManager[None]:
        """Record the time inside as a step; the first step of a generation is a phase as well."""
        return _OFF if self._stepped else self.phase("first step")

    def begin_step(self, step: int, wanted: Record | None) -> None:
        """Record from here on if `wanted` names this step."""
        if wanted is None or not wanted.first_step <= step <= wanted.last_step:
            self._spans = None
        elif self._spans is None:
            self._spans, self._steps, self._marked = [], [], []
            if self._clock is not None:
                self._clock.begin()

    def end_step(self, step: int, wanted: Record | None) -> Recorded | None:
        """End step `step`, which is committed. Return the answer to `wanted` if it is due."""
        self._stepped = True
        if wanted is None:
            return None
        if self._spans is not None:
            self._steps.append(step)
        if step < wanted.last_step:
            return None
        spans, self._spans = self._spans, None
        steps = self._steps if spans is not None else []
        recording = Recording(
            number=wanted.number,
            generation=self._generation,
            steps=tuple(steps),
            spans=(*self._phases, *(spans or ())) if steps else (),
            device=self._on_device() if steps else (),
        )
        self._marked = []
        return Recorded(recording=recording)

    def _on_device(self) -> tuple[Span, ...]:
        """Return the GPU's spans. Waits for queued work."""
        if (clock := self._clock) is None:
            return ()
        found = [
            (name, clock.at_ns(began), clock.at_ns(ended)) for name, began, ended in self._marked
        ]
        return tuple(Span(name, "step", began, ended - began) for name, began, ended in found)

    def computing(self, name: str, detail: int | None = None) -> AbstractContextManager[None]:
        """Record a span, as `span` does, of computation on a device."""
        span = self.span(name, detail)
        if self._spans is None or self._clock is None:
            return span
        return self._marking(span, pulse.called(name, detail), self._clock)

    @contextmanager
    def _marking(
        self, span: AbstractContextManager[None], name: str, clock: DeviceClock[Any]
    ) -> Iterator[None]:
        """Record `span`, and when the device runs the work queued within it."""
        began = clock.mark()
        with span:
            try:
                yield
            finally:
                self._marked.append((name, began, clock.mark()))

    def span(self, name: str, detail: int | None = None) -> AbstractContextManager[None]:
        """Record the time inside under `name`, followed by `detail`."""
        pulse.beat(name, detail)
        if self._spans is None:
            return _OFF
        return OpenSpan(self._spans, pulse.called(name, detail), "step")

    def sum(self, name: str, detail: int) -> OpenSpan | None:
        """Record a sum beside the spans, until its `close`; None: nothing is recorded."""
        return None if self._spans is None else OpenSpan(self._spans, f"{name} {detail}", "sum")


# ---- Compute time of a worker in a step, without its waits.
#
# On a CPU it uses the wall clock, so that a throttled or shared core shows. On a GPU it uses
# events in the queue, which are read at the end of the step. They also keep the host from
# queueing a whole step, whose progress could not be seen. One thread uses it.


#: Moment: seconds, or an event of the device.
_Mark = float | torch.Event
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
        return cls(moment, _passed) if has_queue(device) else cls(time.monotonic)

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


def _passed(mark: _Mark) -> None:
    assert isinstance(mark, torch.Event), "a GPU's moments are events"
    mark.synchronize()


def _between(began: _Mark, ended: _Mark) -> float:
    if isinstance(began, torch.Event):
        assert isinstance(ended, torch.Event), "marks of a step are of one kind"
        return seconds_between(began, ended)  # no wait: the step's vote has waited for both
    assert isinstance(ended, float), "marks of a step are of one kind"
    return ended - began

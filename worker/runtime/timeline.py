"""Spans of a worker's time, in the steps that it was asked to record.

While nothing is recorded, a span costs two calls and a comparison; the pulse is updated in any
case. The phases of the last way into a generation are always kept. A single thread makes all spans,
so they are adjacent or nested; sums run beside them. Work queued on a GPU runs later, so a span of
computation is recorded a second time, as the GPU's.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from oobleck.core.ids import Generation
from oobleck.core.messages import Category, Record, Recorded, Recording, Span
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.device import DeviceClock

_OFF: AbstractContextManager[None] = nullcontext()


class OpenSpan(AbstractContextManager[None]):
    """Span that has begun and not ended."""

    __slots__ = ("_category", "_name", "_spans", "_started_ns")

    def __init__(self, spans: list[Span], name: str, category: Category) -> None:
        self._spans = spans
        self._name = name
        self._category: Category = category
        self._started_ns = time.monotonic_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        ended_ns = time.monotonic_ns()
        self._spans.append(
            Span(self._name, self._category, self._started_ns, ended_ns - self._started_ns)
        )


class _OnDevice(AbstractContextManager[None]):
    """Span with the times at which the device runs the work queued within it."""

    def __init__(
        self,
        span: AbstractContextManager[None],
        name: str,
        clock: DeviceClock[Any],
        marked: list[tuple[str, Any, Any]],
    ) -> None:
        self._span = span
        self._name = name
        self._clock = clock
        self._marked = marked
        self._began = clock.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._marked.append((self._name, self._began, self._clock.mark()))
        self._span.__exit__(kind, error, trace)


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
        return _OnDevice(span, pulse.called(name, detail), self._clock, self._marked)

    def span(self, name: str, detail: int | None = None) -> AbstractContextManager[None]:
        """Record the time inside under `name`, followed by `detail`."""
        pulse.beat(name, detail)
        if self._spans is None:
            return _OFF
        return OpenSpan(self._spans, pulse.called(name, detail), "step")

    def sum(self, name: str, detail: int) -> OpenSpan | None:
        """Record a sum beside the spans, until its `close`; None: nothing is recorded."""
        return None if self._spans is None else OpenSpan(self._spans, f"{name} {detail}", "sum")

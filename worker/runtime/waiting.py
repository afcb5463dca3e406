"""Waits for native calls that an abort or a time limit always ends.

A store's client waits for the answer of a stopped host, whatever its time-out, and NCCL for peers
that never come. So a thread waits that can be given up. Must not know what it waits for.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError

T = TypeVar("T")

DOUBT_S = 2.0
#: After an abort, for calls that end by it: they say what happened.
ABORT_GRACE_S = 0.25


class _Call(Generic[T]):
    def __init__(self, wait: Callable[[], T]) -> None:
        self.wait = wait
        self.done = False
        #: Nobody asks how it ends any more.
        self.given_up = False
        self.results: list[T] = []
        self.error: Exception | None = None

    def make(self) -> None:
        try:
            self.results.append(self.wait())
        except Exception as caught:  # noqa: BLE001  # handed on
            # The boundary of the thread that waits: whoever waits for the call raises it.
            self.error = caught


class Waits:
    """One thread that waits, from the first call on; used by one other at a time. `release` may
    come from any. Without a call, as where nothing goes over NCCL, there is no thread."""

    def __init__(self, doubt_s: float = DOUBT_S) -> None:
        """`doubt_s`: a call that takes longer is looked into, as often."""
        self._doubt_s = doubt_s
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._released = False
        self._thread: threading.Thread | None = None

    def run(
        self,
        wait: Callable[[], T],
        limit_s: float | None = None,
        doubt: Callable[[], object] | None = None,
    ) -> T:
        """Return or raise as `wait` does. Raises TransportError soon after a release, or after
        `limit_s`, and what `doubt` raises, which is called now and then during a long wait; these
        release all later calls too."""
        call = _Call(wait)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="operations", daemon=True)
            self._thread.start()
        self._calls.put(call)
        in_time = False
        try:
            in_time = self._await(call, limit_s, doubt)
        finally:
            with self._changed:
                self._released = self._released or not in_time
        with self._changed:
            call.given_up = not in_time or not self._changed.wait_for(
                lambda: call.done, ABORT_GRACE_S
            )
            if call.given_up:
                call.error = None
            if not in_time:
                raise TransportError(f"no answer for {limit_s:g} s")
            if call.given_up:
                raise TransportError("an operation was given up")
        if call.error is not None:
            error, call.error = call.error, None  # its traceback refers to the call
            try:
                raise error
            finally:
                del error  # and to this frame: what they all hold is freed with the exception
        return call.results.pop()

    def _await(
        self, call: _Call[T], limit_s: float | None, doubt: Callable[[], object] | None
    ) -> bool:
        """Whether the call was done, or all are released, in time."""
        end_at = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = end_at - time.monotonic()
            with pulse.WAITING, self._changed:
                span_s = min(left_s, self._doubt_s)
                if self._changed.wait_for(lambda: call.done or self._released, span_s):
                    return True
            if left_s <= self._doubt_s:
                return False
            if doubt is not None:
                with pulse.WAITING:
                    doubt()

    @property
    def released(self) -> bool:
        """Whether every wait ends at once."""
        return self._released

    def release(self) -> None:
        """End all waits, now and later."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, unless it is one that was given up."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call.make()
            with self._changed:
                call.done = True
                if call.given_up:
                    call.error = None  # it and the call hold each other, and what was to be built
                self._changed.notify_all()
            del call

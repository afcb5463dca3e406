"""Waiting for native calls in such a way that an abort, or a limit of time, always ends the wait.

When a connection breaks, gloo wakes whoever waits for an operation that it has in one of its
queues, but not one whose message is just being read or written (gloo/transport/tcp/pair.cc,
Pair::signalException): unless it is ended otherwise, that wait goes on until the operation's
time-out. A store's client waits for the answer of a host that is stopped, whatever its time-out. So
the waiting is done by a thread that can be given up. Must not know what is waited for.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError

T = TypeVar("T")

#: A call that takes longer than this is looked into, as often.
DOUBT_S = 2.0
#: After an abort, for the operations that gloo does wake: they say what happened.
ABORT_GRACE_S = 0.25


class _Call(Generic[T]):
    def __init__(self, wait: Callable[[], T], told: Callable[[], None]) -> None:
        self.wait = wait
        self.told = told
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


class Meanwhile(Protocol):
    """What is to go on while a call is waited for."""

    def run(self, done: Callable[[], bool]) -> None:
        """Until `done`. Raises TransportError."""

    def wake(self) -> None:
        """Have `run` look whether it is done; from any thread, at any time after."""


def _nothing() -> None:
    pass


class _Nothing:
    def run(self, done: Callable[[], bool]) -> None:
        pass

    def wake(self) -> None:
        pass


_NOTHING = _Nothing()


class Waits:
    """One thread that waits; used by one other at a time. `release` may come from any."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._released = False
        threading.Thread(target=self._serve, name="operations", daemon=True).start()

    def run(
        self,
        wait: Callable[[], T],
        limit_s: float | None = None,
        meanwhile: Meanwhile = _NOTHING,
        end: Callable[[], object] = _nothing,
        doubt: Callable[[], object] = _nothing,
    ) -> T:
        """Return or raise as `wait` does, or raise TransportError: soon after the release, after
        `limit_s`, or as `doubt` does, which is called where it takes long; either is a release for
        all later calls. `end`, where given, has a `wait` that is to be given up end soon."""
        call = _Call(wait, meanwhile.wake)
        self._calls.put(call)
        meanwhile.run(lambda: call.done)
        in_time = False
        try:
            in_time = self._await(call, limit_s, doubt)
        finally:
            with self._changed:
                self._released = self._released or not in_time
        if not call.done:
            end()
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

    def _await(self, call: _Call[T], limit_s: float | None, doubt: Callable[[], object]) -> bool:
        """Whether the call was done, or all are released, in time."""
        end_at = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = end_at - time.monotonic()
            with pulse.WAITING, self._changed:
                span_s = min(left_s, DOUBT_S)
                if self._changed.wait_for(lambda: call.done or self._released, span_s):
                    return True
            if left_s <= DOUBT_S:
                return False
            with pulse.WAITING:
                doubt()

    @property
    def released(self) -> bool:
        return self._released

    def release(self) -> None:
        """Let nobody wait any longer, now and later."""
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
            call.told()
            del call

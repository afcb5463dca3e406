"""Waiting for operations in such a way that an abort always ends the wait.

When a connection breaks, gloo wakes whoever waits for an operation that it has in one of its
queues, but not one whose message is just being read or written: that wait goes on until the
operation's time-out, and closing connections does not end it. So the waiting is done by a thread
that can be given up. Must not know what is waited for.
"""

import queue
import threading
from collections.abc import Callable

from oobleck.worker.errors import TransportError

#: After an abort, for the operations that gloo does wake: they say what happened.
ABORT_GRACE_S = 0.25


class _Call:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.done = False
        self.error: Exception | None = None


class Waits:
    """One thread that waits; used by one other at a time. `release` may come from any."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._released = False
        threading.Thread(target=self._serve, name="operations", daemon=True).start()

    def run(self, wait: Callable[[], object]) -> None:
        """Return or raise as `wait` does, or raise TransportError soon after the release."""
        call = _Call(wait)
        self._calls.put(call)
        with self._changed:
            self._changed.wait_for(lambda: call.done or self._released)
            if not self._changed.wait_for(lambda: call.done, ABORT_GRACE_S):
                raise TransportError("an operation was given up")
        if call.error is not None:
            error, call.error = call.error, None  # its traceback refers to the call
            raise error

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
            error: Exception | None = None
            try:
                call.wait()
            except Exception as caught:  # noqa: BLE001  # handed on
                # The boundary of this thread: whoever waits for the call raises it.
                error = caught
            with self._changed:
                call.error, call.done = error, True
                self._changed.notify_all()
            del call, error

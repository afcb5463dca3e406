"""Virtual time for asyncio programs, and processes that can be stopped, continued and killed.

Time passes only when nothing is left to do at a moment; then it jumps to the next timer. What is
due at one moment runs in the order in which it was asked for, so a run follows from its inputs
alone. Every task and callback belongs to the process in whose context it was made: those of a
stopped process are kept until it goes on, and what a dead one still does has no effect, which the
stand-ins for its environment see to (`Process.alive`).
"""

import asyncio
import heapq
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

#: Callbacks at one moment; more would never end.
MOST_AT_ONCE = 200_000

#: Ended tasks that a process may keep.
MOST_DONE = 100

_current: ContextVar["Process | None"] = ContextVar("process", default=None)


class Killed(BaseException):
    """The process was killed in the middle of this call."""


class Process:
    """One process of the simulated machines: owns tasks, and a name for the transcript."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.stopped = False
        #: What it would have done while it was stopped.
        self.held: deque[asyncio.Handle] = deque()
        self.tasks: list[asyncio.Task[Any]] = []
        self.context: Context = copy_context()
        self.context.run(_current.set, self)
        #: Told once, when it is dead.
        self.on_end: list[Callable[[], None]] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that nobody else watches."""
        task = self.loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """An error that nobody takes is the end of the process, which has to be looked at."""
        if self.alive and not task.cancelled() and (error := task.exception()) is not None:
            self.loop.troubles.append(error)

    def call(self, act: Callable[..., object], *args: object) -> None:
        """Have it run `act` as soon as it runs at all."""
        self.loop.call_soon(act, *args, context=self.context)

    def later(self, delay_s: float, act: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, act, *args, context=self.context)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self.loop.release(self)

    def kill(self) -> None:
        """SIGKILL: from now on nothing that it does has an effect."""
        if not self.alive:
            return
        self.alive = False
        self.go_on()
        for task in self.tasks:
            task.cancel()
        for tell in self.on_end:
            tell()


def current() -> Process | None:
    return _current.get()


class VirtualLoop(base_events.BaseEventLoop):
    """An event loop whose clock is a number."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.clock = 0.0
        self._limit_s = limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._asked = 0
        self.iterations = 0
        #: Called when all is done at a moment, before time passes.
        self.at_rest: Callable[[], None] = lambda: None
        #: Exceptions that nobody took.
        self.troubles: list[BaseException] = []
        self.set_exception_handler(self._note)

    def _note(self, _: object, context: dict[str, Any]) -> None:
        # The loop itself calls this, and the context of what failed is in its handle.
        handle = context.get("handle")
        process = handle._context.get(_current) if handle is not None else _current.get()
        error = context.get("exception") or RuntimeError(context["message"])
        if process is None or process.alive:
            self.troubles.append(error)

    def time(self) -> float:
        return self.clock

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._asked += 1
        heapq.heappush(self._timers, (max(when, self.clock), self._asked, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_task(self, work: Any, *, name: Any = None, context: Any = None) -> Any:
        task: Any = asyncio.Task(work, loop=self, name=name, context=context)
        process = _current.get() if context is None else context.get(_current)
        if process is not None:
            if len(process.tasks) > MOST_DONE:
                process.tasks = [other for other in process.tasks if not other.done()]
            process.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        """Threads would make runs differ: the work is done at once."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - it is handed on, as a thread would
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        pass  # nobody sleeps

    def release(self, process: Process) -> None:
        self._ready.extend(process.held)  # type: ignore[attr-defined]
        process.held.clear()

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        for _ in range(MOST_AT_ONCE):
            if not ready:
                break
            handle = ready.popleft()
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            process: Process | None = handle._context.get(_current)  # type: ignore[attr-defined]
            if process is not None and process.stopped:
                process.held.append(handle)
                continue
            self.iterations += 1
            handle._run()  # type: ignore[attr-defined]
        else:
            raise RuntimeError(f"time stands still at {self.clock}")
        if self._stopping:  # type: ignore[attr-defined]
            return
        self.at_rest()
        if ready:
            return
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("nothing will ever happen any more")
        self.clock = max(self.clock, timers[0][0])
        if self.clock > self._limit_s:
            raise RuntimeError(f"not over after {self._limit_s} s")
        while timers and timers[0][0] <= self.clock:
            ready.append(heapq.heappop(timers)[2])

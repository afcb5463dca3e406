"""Inbox of the loop that owns the state: handlers that other tasks queue, called in order of
arrival.

`ask` answers only when the iteration that computed the answer is on disk. Owns also the types of
messages that agents send in a running session.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from oobleck.core.ids import Generation, JobId
from oobleck.core.messages import StepRecord
from oobleck.proto.types import NodeStatus, WorkerReport

T = TypeVar("T")
#: Called by the loop with the time of its arrival.
Handler = Callable[[float], None]


class MasterEnded(Exception):
    """Failure of a request: the master ended before the answer was on disk; ask its successor."""


class Inbox:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._handlers: deque[tuple[float, Handler]] = deque()
        self._arrived = asyncio.Event()
        self._answers: list[Callable[[], None]] = []
        self._open: set[asyncio.Future[Any]] = set()
        self._of_operators: set[asyncio.Future[Any]] = set()

    def post(self, handle: Handler) -> None:
        """Queue a handler. Callers bound the number of their own handlers here."""
        self._handlers.append((self._clock(), handle))
        self._arrived.set()

    async def ask(self, answer: Callable[[float], T], *, of_operator: bool = False) -> T:
        """Queue `answer`, and return its result once that is on disk. Raises MasterEnded, and the
        error with which operators are refused (`refuse`)."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def settle(value: T) -> None:
            if not future.done():  # the asking task was cancelled
                future.set_result(value)

        def handle(arrived_at: float) -> None:
            value = answer(arrived_at)
            self._answers.append(lambda: settle(value))

        self.post(handle)
        self._open.add(future)
        if of_operator:
            self._of_operators.add(future)
        try:
            return await future
        finally:
            self._open.discard(future)
            self._of_operators.discard(future)

    def close(self) -> None:
        """Fail every request that still waits for an answer with MasterEnded."""
        for future in self._open:
            if not future.done():
                future.set_exception(MasterEnded)

    def refuse(self, error: Exception) -> None:
        """Fail all waiting operators' requests with `error`; they may still be carried out."""
        for future in self._of_operators:
            if not future.done():
                future.set_exception(error)

    # ---- the owner's side

    async def wait(self, timeout_s: float) -> None:
        """Wait until a handler arrives, for at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._arrived.wait()
        except TimeoutError:
            return

    @property
    def waiting(self) -> int:
        """Number of handlers in the queue."""
        return len(self._handlers)

    def handle(self, most: int | None) -> None:
        """Call up to `most` handlers, the oldest first; None: all."""
        self._arrived.clear()
        queued = len(self._handlers)
        for _ in range(queued if most is None else min(queued, most)):
            arrived_at, handle = self._handlers.popleft()
            handle(arrived_at)
        if self._handlers:
            self._arrived.set()

    def answer_all(self) -> None:
        """Deliver the answers of handled requests; called once their events are on disk."""
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()


class Turns:
    """Gate that lets few waiting tasks continue in each turn of the event loop."""

    def __init__(self, most: int = 4) -> None:
        self._gate = asyncio.Semaphore(most)

    async def take(self) -> None:
        async with self._gate:
            await asyncio.sleep(0)


class Changes:
    """Signal of changes, for any number of waiting tasks. Read `next` before the state, so that no
    change is missed."""

    def __init__(self) -> None:
        self.next = asyncio.Event()
        #: Hundreds of tasks may wait, and each takes a while to process a change.
        self._turns = Turns()

    async def after(self, changed: asyncio.Event) -> None:
        """Return after the change, with few others at a time."""
        await changed.wait()
        await self._turns.take()

    def happened(self) -> None:
        self.next.set()
        self.next = asyncio.Event()


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """Step records from an agent, in any order, and repeatedly."""

    job_id: JobId
    records: tuple[StepRecord, ...]
    #: Generation that found them beside a checkpoint; 0: workers of the node made them.
    restored_in: Generation = Generation(0)


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one worker's output."""

    job_id: JobId
    slot: int
    lines: tuple[str, ...]


Incoming = NodeStatus | WorkerReport | Records | Output

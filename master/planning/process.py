"""Client of the process that makes the master's plans (`oobleck.master.planning.worker`).

Planning takes a core for seconds, and its libraries take tens of megabytes. Both stay out of the
process that serves the nodes. The planning process is started with the first job, so that it is
warm when that job's nodes are ready. It is restarted whenever it ends. Must not know what plans are
for.
"""

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from oobleck.host.ipc.channel import frame, read_frame
from oobleck.host.metrics import Durations
from oobleck.host.system.process import send_signal, with_parent
from oobleck.master.planning.requests import Broken, PlanReply, PlanRequest, StillPlanning

log = logging.getLogger(__name__)

#: Number of processes that may end over one request before it is given up.
_MOST_ENDS = 3
_RESTART_S = 0.5
#: Seconds after which a process counts as hung; the largest first plan takes a slow machine a
#: minute.
_LONGEST_S = 600.0
#: No plan is made ahead after one that took longer, since an awaited plan waits for the one under
#: way.
_LONGEST_AHEAD_S = 1.0
#: Multiple of that limit from which on a plan made ahead counts as hung.
_PATIENCE = 5

_reply: msgspec.json.Decoder[PlanReply] = msgspec.json.Decoder(PlanReply)
#: Replies kept besides those that the last decision used.
_KEPT = 8


class PlanningProcess:
    """`Planner` that asks another process, one request at a time."""

    def __init__(self) -> None:
        #: Longest time of a reply,
        self.longest_s = _LONGEST_S
        #: and of the last plan, if plans are to be made ahead.
        self.longest_ahead_s = _LONGEST_AHEAD_S
        self._took_s = 0.0
        #: Durations of awaited replies, and of those made ahead; and how often a process has ended
        #: or hung.
        self.took, self.took_ahead = Durations(), Durations()
        self.failures = 0
        self._replies = Replies()
        self._wanted: PlanRequest | None = None
        #: Requests that may come next, and those of them that are not planned yet.
        self._foreseen: tuple[PlanRequest, ...] = ()
        self._ahead: deque[PlanRequest] = deque()
        #: Request under way, whether it is planned ahead, and the number of processes that ended
        #: over it.
        self._at_work: PlanRequest | None = None
        self._unasked = False
        self._ends = 0
        self._sent_at = 0.0
        self._writer: asyncio.StreamWriter | None = None
        #: Descriptor of the process, to kill no other: asyncio may reap it first, and its pid may
        #: be reused.
        self._handle: int | None = None
        #: Ends a process that is busy for too long.
        self._limit: asyncio.TimerHandle | None = None
        self._notify: Callable[[], None] = lambda: None
        self._needed = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """True while the process makes a plan."""
        return self._at_work is not None

    def prepare(self) -> None:
        """Start a process, unless one runs."""
        self._needed.set()

    def reply(self, request: PlanRequest) -> PlanReply:
        """Return the reply to `request`. Raises StillPlanning."""
        return self._replies.reply(request)

    def listen(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each new reply."""
        self._notify = notify

    def want(self, request: PlanRequest | None) -> None:
        """Set the request that the newest decision waits for; None: it waits for no plan. The plan
        under way is finished first."""
        self._replies.forget_unused()
        self._wanted = request
        if request is not None:
            self._unasked = self._unasked and request != self._at_work
            self.prepare()
            self._send()

    def foresee(self, requests: tuple[PlanRequest, ...]) -> None:
        """Make these plans while no decision waits."""
        if requests is self._foreseen:
            return
        self._foreseen, self._ahead = requests, deque(requests)
        self._replies.forget_ahead()
        self._send()

    def _send(self) -> None:
        if self._writer is None or self._at_work is not None:
            return
        request = self._wanted
        self._unasked = request is None or request in self._replies
        if self._unasked:
            quick = self._took_s <= self.longest_ahead_s
            request = self._ahead.popleft() if quick and self._ahead else None
        if request is None:
            return
        self._at_work, self._ends = request, 0
        self._sent_at = asyncio.get_running_loop().time()
        self._put(self._writer, request)

    def _put(self, writer: asyncio.StreamWriter, request: PlanRequest) -> None:
        try:
            writer.write(frame(request))
        except ValueError as error:  # beyond all bounds
            self._take(Broken(error=str(error)))
            return
        limit_s = _PATIENCE * self.longest_ahead_s if self._unasked else self.longest_s
        self._limit = asyncio.get_running_loop().call_later(limit_s, self._give_up, limit_s)

    def _give_up(self, after_s: float) -> None:
        log.error("the planning process hangs", extra={"after_s": after_s})
        self._took_s = max(self._took_s, after_s)
        self._kill()

    def _kill(self) -> None:
        send_signal(self._handle, signal.SIGKILL)

    def _stop_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _take(self, reply: PlanReply) -> None:
        self._stop_limit()
        request, self._at_work = self._at_work, None
        unasked = self._unasked
        if request is not None and not unasked:
            self._replies.add(request, reply)
        elif request in self._foreseen and not isinstance(reply, Broken):
            self._replies.add_ahead(request, reply)
        self._took_s = asyncio.get_running_loop().time() - self._sent_at
        (self.took_ahead if unasked else self.took).add(self._took_s)
        self._send()
        if not unasked:
            self._notify()

    # ---- the process

    async def run(self) -> None:
        """Keep a process running once it is needed, until cancelled."""
        await self._needed.wait()
        while True:
            try:
                ended = await self._serve()
            except OSError as error:
                ended = f"cannot be started: {error}"
            except ValueError as error:  # made by another version, after an update of the files
                ended = f"was not understood: {error}"
                self._ends += 1
            self.failures += 1
            log.error("the planning process failed", extra={"reason": ended})
            if self._at_work is not None and self._ends >= _MOST_ENDS:
                self._take(Broken(error=f"the planning process {ended}"))
            await asyncio.sleep(_RESTART_S)

    async def _serve(self) -> str:
        """Start a process and take its replies; return how it ended. Raises OSError."""
        own, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=own)
        process: asyncio.subprocess.Process | None = None
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *with_parent("oobleck.master.planning.worker"),
                    stdin=theirs.fileno(),
                    start_new_session=True,
                )
            with suppress(ProcessLookupError):  # it has ended, and was reaped
                self._handle = os.pidfd_open(process.pid)
            self._writer = writer
            if self._at_work is not None and self._at_work == self._wanted:
                self._put(writer, self._at_work)
            else:
                self._at_work = None
                self._send()
            with suppress(ConnectionError):
                while (body := await read_frame(reader)) is not None:
                    self._take(_reply.decode(body))
        finally:
            self._writer = None
            writer.close()
            self._stop_limit()
            self._kill()
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
            if process is not None:
                await process.wait()
        if self._at_work is not None:
            self._ends += 1
        return f"ended with exit code {process.returncode}"


class Replies:
    """Cache of the planner's replies, bounded by what current decisions need."""

    def __init__(self) -> None:
        #: Ordered by last use; comparing requests takes milliseconds for large plans.
        self._known: dict[PlanRequest, PlanReply] = {}
        #: Number of replies used since the last decision.
        self._used = 0
        #: Replies made ahead.
        self._ahead: dict[PlanRequest, PlanReply] = {}

    def __contains__(self, request: PlanRequest) -> bool:
        return request in self._known or request in self._ahead

    def reply(self, request: PlanRequest) -> PlanReply:
        """Return the reply to `request`. Raises StillPlanning."""
        reply = self._known.pop(request, None) or self._ahead.pop(request, None)
        if reply is None:
            raise StillPlanning(request)
        self._known[request] = reply
        self._used += 1
        return reply

    def add(self, request: PlanRequest, reply: PlanReply) -> None:
        self._known[request] = reply

    def add_ahead(self, request: PlanRequest, reply: PlanReply) -> None:
        """Store a reply that was made ahead."""
        self._ahead[request] = reply

    def forget_ahead(self) -> None:
        self._ahead.clear()

    def forget_unused(self) -> None:
        """Drop the replies that the last decision did not use, except the newest ones. A decision
        that uses many at once finds all of them again."""
        spare = len(self._known) - self._used - _KEPT
        for request in list(self._known)[: max(0, spare)]:
            del self._known[request]
        self._used = 0

"""The master, as pages use it: the running feeds, each once for all browsers, and single calls.

Feeds that nobody has looked at recently are closed. Calls run in threads, a few at a time.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from oobleck.cli.client import MasterClient
from oobleck.cli.dashboard.parts import Problem
from oobleck.cli.jobs.follow import log_time
from oobleck.cli.view.feeds import (
    ClusterFeed,
    Connect,
    EventFeed,
    JobFeed,
    LogFeed,
    Snapshot,
)
from oobleck.host.command import DENIED, NO_SUCH_THING, UNREACHABLE, USAGE, CommandFailed
from oobleck.proto import control_pb2 as pb

#: Time after the last look at which a feed is closed.
IDLE_S = 30.0
#: Most feeds of one kind.
MOST_FEEDS = 16
#: Age, by the job's last sign of life, from which output is not shown.
_OUTPUT_S = 3600.0
#: Age up to which an answer is shown at once.
_FRESH_S = 2.0
#: Age from which an answer counts as old: so many seconds, or so many times its own duration if
#: that is longer. A feed asks again after some four durations.
_OLD_S = 5.0
_OLD_ANSWERS = 10.0
_PATIENCE_S = 3.0
_POLL_S = 0.02

F = TypeVar("F", JobFeed, LogFeed, EventFeed)


async def until(condition: Callable[[], bool], patience_s: float) -> None:
    """Wait until `condition` holds, at most `patience_s`; other threads change it."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        if condition():
            return
        await asyncio.sleep(_POLL_S)


class Hub:
    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self.cluster = ClusterFeed(connect)
        self._jobs: dict[str, JobFeed] = {}
        self._logs: dict[str, LogFeed] = {}
        #: Feed of the cluster's events, under one key, so that it is handled like the others.
        self._events: dict[str, EventFeed] = {}

    def close(self) -> None:
        self.cluster.close()
        for feed in self._jobs.values():
            feed.close()
        for output in self._logs.values():
            output.close()
        for events in self._events.values():
            events.close()

    async def look(self, job_id: str = "") -> Snapshot | None:
        """Return the master's current or last answer about the cluster; None: it never answered.
        `job_id`: job that a current answer must have, unless it was asked for only now."""
        feed = self.cluster
        feed.touch()
        asked, asked_at = feed.version, time.time()

        def has_answered() -> bool:
            if feed.trouble is not None and feed.version > asked:
                return True
            found = feed.snapshot
            if found is None or found.at + found.took_s <= asked_at - _FRESH_S:
                return False
            return found.at >= asked_at or not job_id or found.job(job_id) is not None

        await until(has_answered, _PATIENCE_S)
        return feed.snapshot

    def is_old(self) -> bool:
        """Return whether the last answer about the cluster is old. A slow answer counts as new for
        longer, since the next one takes as long."""
        found = self.cluster.snapshot
        if found is None or self.cluster.trouble is not None:
            return True
        return time.time() - found.at > max(_OLD_S, _OLD_ANSWERS * found.took_s)

    def events(self) -> EventFeed:
        """Return the feed of the cluster's events."""
        return _found(self._events, "cluster", lambda: EventFeed(self._connect))

    def job(self, status: pb.JobStatus) -> JobFeed:
        """Return the job's feed. Raise Problem."""
        name = status.job_id
        return _found(self._jobs, name, lambda: JobFeed(self._connect, name, status.recorded_step))

    def logs(self, status: pb.JobStatus) -> LogFeed:
        """Return the feed of the job's output. Raise Problem."""
        name = status.job_id
        return _found(self._logs, name, lambda: LogFeed(self._connect, name, _since(status)))

    async def reap(self) -> None:
        """Close idle feeds, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 6)
            _close_idle(self._jobs)
            _close_idle(self._logs)
            _close_idle(self._events)


def _found(feeds: dict[str, F], name: str, make: Callable[[], F]) -> F:
    if name not in feeds:
        if len(feeds) >= MOST_FEEDS:
            problem = f"pages of {MOST_FEEDS} jobs are open already; close some of them"
            raise Problem(503, problem, "Too many pages")
        feeds[name] = make()
    feeds[name].touched = time.monotonic()
    return feeds[name]


def _close_idle(feeds: dict[str, F]) -> None:
    now = time.monotonic()
    for name, feed in list(feeds.items()):
        if now - feed.touched > IDLE_S:
            feed.close()
            del feeds[name]


def _since(status: pb.JobStatus) -> str:
    """Return the time from which a job's output is read, because it may be long."""
    return log_time((status.finished_at or time.time()) - _OUTPUT_S)


# ---- single calls


T = TypeVar("T")

#: HTTP status by the command line's exit code.
_STATUS = {
    USAGE: 409,
    NO_SUCH_THING: 404,
    UNREACHABLE: 503,
    DENIED: 403,
}
#: Interval of checks that the browser is still connected.
_LOOK_S = 1.0


class Calls:
    def __init__(self, connect: Connect, *, at_once: int) -> None:
        self._connect = connect
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="call")

    async def ask(self, request: Request, what: Callable[[MasterClient], T]) -> T:
        """Call the master; cancel when the browser disconnects. Raise Problem."""
        try:
            client = self._connect()
        except (CommandFailed, ValueError) as error:
            raise Problem(503, str(error), "Not done") from error
        with client:
            asked = asyncio.get_running_loop().run_in_executor(self._threads, what, client)
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    asked.cancel()
                    raise Problem(499, "the browser has disconnected")
            try:
                return asked.result()
            except CommandFailed as failed:
                status = _STATUS.get(failed.exit_code, 500)
                raise Problem(status, str(failed), "Not done") from failed

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

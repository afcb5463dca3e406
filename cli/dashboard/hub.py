"""Registry of the feeds that run: those looked at lately, each once for all browsers."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from oobleck.cli.dashboard.feeds import ClusterFeed, JobFeed, LogFeed, Snapshot
from oobleck.cli.dashboard.following import Connect
from oobleck.cli.output.text import ENDED
from oobleck.proto import control_pb2 as pb

#: A feed that nobody has looked at for so long is let go.
IDLE_S = 30.0
#: Feeds of a kind at a time.
MOST_FEEDS = 32
#: Output that is older, by the job's last sign of life, is not shown.
_OUTPUT_S = 3600.0
#: An answer that old is shown at once.
_FRESH_S = 2.0
_PATIENCE_S = 3.0
_POLL_S = 0.02

F = TypeVar("F", JobFeed, LogFeed)


class TooMany(Exception):
    """Error where more than MOST_FEEDS jobs would be looked at."""


async def until(condition: Callable[[], bool], patience_s: float) -> None:
    """Wait until it holds or has not held for so long. What it depends on comes from threads."""
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

    def close(self) -> None:
        self.cluster.close()
        for feed in self._jobs.values():
            feed.close()
        for output in self._logs.values():
            output.close()

    async def look(self) -> Snapshot | None:
        """The cluster as it is now, or was when the master last answered; None: it never has."""
        feed = self.cluster
        feed.touch()
        asked = feed.version

        def has_answered() -> bool:
            if feed.trouble is not None and feed.version > asked:
                return True
            return feed.snapshot is not None and time.time() - feed.snapshot.at < _FRESH_S

        await until(has_answered, _PATIENCE_S)
        return feed.snapshot

    def job(self, status: pb.JobStatus) -> JobFeed:
        """Raises TooMany."""
        name = status.job_id
        return _found(self._jobs, name, lambda: JobFeed(self._connect, name, status.committed_step))

    def logs(self, status: pb.JobStatus) -> LogFeed:
        """Raises TooMany."""
        name = status.job_id
        return _found(self._logs, name, lambda: LogFeed(self._connect, name, _since(status)))

    async def reap(self) -> None:
        """Never returns; ends by cancellation."""
        while True:
            await asyncio.sleep(IDLE_S / 6)
            _let_go(self._jobs)
            _let_go(self._logs)


def _found(feeds: dict[str, F], name: str, make: Callable[[], F]) -> F:
    if name not in feeds:
        if len(feeds) >= MOST_FEEDS:
            raise TooMany(f"{MOST_FEEDS} jobs are looked at already; close some of their pages")
        feeds[name] = make()
    feeds[name].touched = time.monotonic()
    return feeds[name]


def _let_go(feeds: dict[str, F]) -> None:
    now = time.monotonic()
    for name, feed in list(feeds.items()):
        if now - feed.touched > IDLE_S:
            feed.close()
            del feeds[name]


def _since(status: pb.JobStatus) -> str:
    """Return the time from which a job's output is read: all of it may be much."""
    alive = status.finished_at if status.state in ENDED and status.finished_at else time.time()
    return datetime.fromtimestamp(alive - _OUTPUT_S, UTC).isoformat(timespec="microseconds")

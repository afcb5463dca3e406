"""Following a job until it ends, also while the master is away for a while, as in a restart.

Followers ask again, and neither omit nor repeat anything. They wait only for a master that has
answered once; a wrong address is reported at once.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.output.text import ENDED
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb

#: Longest absence of a master before its follower ends.
AWAY_S = 60.0
#: Pause between two attempts.
_AGAIN_S = 0.5


#: Most items of streams that are read ahead.
_AHEAD = 1000

K = TypeVar("K")
T = TypeVar("T")


def warn(line: str) -> None:
    click.echo(f"oobleck: {line}", err=True)


def ignore(line: str) -> None:
    """Print nothing, where another stream of the same master reports its absence."""


class Away:
    """Waiting for one master, with one message."""

    def __init__(
        self,
        tell: Callable[[str], None] = warn,
        *,
        answered: bool = False,
        patience_s: float = AWAY_S,
    ) -> None:
        """Prepare. `answered`: the master has answered before."""
        self._tell = tell
        self._patience_s = patience_s
        self._since: float | None = None
        self._known = answered

    def answered(self) -> None:
        if self._since is not None:
            self._tell("the master is back")
        self._since, self._known = None, True

    def wait(self, unreachable: Unreachable) -> None:
        """Sleep before the next attempt. Raise `unreachable` if the master has never answered, or
        was away for too long."""
        now = time.monotonic()
        if not self._known or now - (self._since or now) >= self._patience_s:
            raise unreachable
        if self._since is None:
            self._since = now
            self._tell("the master is away; running jobs continue without it")
        time.sleep(_AGAIN_S)


def _resumed(away: Away, ask: Callable[[], Iterator[T]]) -> Iterator[T]:
    """Yield a stream's items; ask for it again while the master is away. Raise CommandFailed."""
    while True:
        try:
            for item in ask():
                away.answered()
                yield item
            return
        except Unreachable as unreachable:
            away.wait(unreachable)


def follow_events(
    master: MasterClient,
    job_id: str,
    *,
    answered: bool = False,
    tell: Callable[[str], None] = warn,
) -> Iterator[pb.EventRecord]:
    """Yield all records of the job until it ends. `answered`: this master has answered before.
    Raise CommandFailed."""
    told = 0
    away = Away(tell, answered=answered)
    for record in _resumed(away, lambda: master.events(job_id, follow=True)):
        number = int(json.loads(record.json)["id"])
        if number > told:
            told = number
            yield record


def follow_metrics(
    master: MasterClient,
    job_id: str,
    *,
    from_step: int = 1,
    evaluations: bool = False,
    tell: Callable[[str], None] = warn,
) -> Iterator[str]:
    """Yield the lines of the job's steps, or of its evaluations, until it ends. The master has
    answered before. Raise CommandFailed."""
    step = from_step

    def ask() -> Iterator[str]:
        return master.metrics(job_id, follow=True, from_step=step, evaluations=evaluations)

    for line in _resumed(Away(tell, answered=True), ask):
        # After a power loss the master may lack lines that were shown already.
        if (found := int(json.loads(line)["step"])) >= step:
            step = found + 1
            yield line


@dataclass(slots=True)
class LogPosition:
    """Position in a job's output, up to which it was shown."""

    #: Time of the newest line, and the number of shown lines of that time.
    time: str = ""
    lines: int = 0
    #: Time from which the lines come now, and how many of that time were shown and come again.
    _since: str = ""
    _again: int = 0

    def again(self) -> str:
        """Expect the lines from the position's time on once more, and return that time."""
        self._since, self._again = self.time, self.lines
        return self.time

    def is_new(self, line: pb.LogLine) -> bool:
        """Return whether the line was not shown yet; the position is then behind it."""
        if line.time == self._since and self._again:
            self._again -= 1
            return False
        if line.time != self.time:
            self.time, self.lines = line.time, 0
        self.lines += 1
        return True


def log_time(unix: float) -> str:
    """Format a time as in the master's log lines."""
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="microseconds")


def follow_logs(
    master: MasterClient, job_id: str, *, node: str | None, rank: int | None, behind: LogPosition
) -> Iterator[pb.LogLine]:
    """Yield the workers' lines after `behind`, and new ones until the job ends. The position is
    updated. Raise CommandFailed."""

    def ask() -> Iterator[pb.LogLine]:
        return master.logs(job_id, follow=True, node=node, rank=rank, since=behind.again())

    yield from filter(behind.is_new, _resumed(Away(answered=True), ask))


def follow_status(
    master: MasterClient, job_id: str, tell: Callable[[str], None], *, patience_s: float = AWAY_S
) -> Iterator[pb.JobStatus]:
    """Yield each status of the job until it has ended. The master has answered before. Raise
    CommandFailed."""
    away = Away(tell, answered=True, patience_s=patience_s)
    while True:  # a stream that ends early is asked for again
        for status in _resumed(away, lambda: master.watch(job_id)):
            yield status
            if status.state in ENDED:
                return


def merged(streams: Mapping[K, Iterator[Any]]) -> Iterator[tuple[K, Any] | None]:
    """Yield the items of all streams as they come, each with its stream's name.

    Threads read the streams. `(NAME, None)`: that stream has ended; None: no item is there now.
    Raise CommandFailed.
    """
    items: queue.Queue[tuple[K, Any]] = queue.Queue(_AHEAD)

    def read(name: K, stream: Iterator[Any]) -> None:
        try:
            for item in stream:
                items.put((name, item))
            items.put((name, None))
        except CommandFailed as failed:
            items.put((name, failed))

    for name, stream in streams.items():
        threading.Thread(target=read, args=(name, stream), daemon=True).start()
    going = len(streams)
    while going:
        if items.empty():
            yield None
        name, item = items.get()
        if isinstance(item, CommandFailed):
            raise item
        going -= item is None
        yield name, item

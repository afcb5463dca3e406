"""Following a job until it ends, also while the master is away for a while, as in a restart.

Followers ask again, and neither omit nor repeat anything. They wait only for a master that has
answered once; a wrong address is reported at once.
"""

import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.output import text
from oobleck.cli.output.events import event_line
from oobleck.cli.output.table import cut
from oobleck.core.units import count
from oobleck.host.command import CommandFailed
from oobleck.host.display import inline
from oobleck.proto import control_pb2 as pb

#: Longest absence of a master before its follower ends.
AWAY_S = 60.0
#: Pause between two attempts.
_AGAIN_S = 0.5


#: Most items of streams that are read ahead.
_AHEAD = 1000

K = TypeVar("K")


def warn(line: str) -> None:
    click.echo(f"oobleck: {line}", err=True)


def ignore(line: str) -> None:
    """Print nothing, where another stream of the same master reports its absence."""


class Away:
    """Waiting for one master, with one message."""

    def __init__(self, tell: Callable[[str], None] = warn, *, patience_s: float = AWAY_S) -> None:
        self._tell = tell
        self._patience_s = patience_s
        self._since: float | None = None
        self._known = False

    def answered(self) -> None:
        if self._since is not None:
            self._tell("the master is back")
        self._since, self._known = None, True

    def wait(self, unreachable: Unreachable) -> None:
        """Sleep before the next attempt.

        Raise `unreachable` if the master has never answered, or was away for too long.
        """
        now = time.monotonic()
        if not self._known or now - (self._since or now) >= self._patience_s:
            raise unreachable
        if self._since is None:
            self._since = now
            self._tell("the master is away; running jobs continue without it")
        time.sleep(_AGAIN_S)


def follow_events(
    master: MasterClient,
    job_id: str,
    *,
    answered: bool = False,
    tell: Callable[[str], None] = warn,
) -> Iterator[pb.EventRecord]:
    """Yield all records of the job until it ends.

    `answered`: this master has answered before. Raise CommandFailed.
    """
    away, told = Away(tell), 0
    if answered:
        away.answered()
    while True:
        try:
            for record in master.events(job_id, follow=True):
                away.answered()
                number = int(json.loads(record.json)["id"])
                if number > told:
                    told = number
                    yield record
            return
        except Unreachable as unreachable:
            away.wait(unreachable)


def follow_metrics(
    master: MasterClient,
    job_id: str,
    *,
    from_step: int = 1,
    evaluations: bool = False,
    tell: Callable[[str], None] = warn,
) -> Iterator[str]:
    """Yield the lines of the job's steps, or of its evaluations, until it ends.

    The master has answered before. Raise CommandFailed.
    """
    away, step = Away(tell), from_step
    away.answered()
    while True:
        try:
            for line in master.metrics(
                job_id, follow=True, from_step=step, evaluations=evaluations
            ):
                away.answered()
                # After a power loss the master may lack lines that were shown already.
                if (found := int(json.loads(line)["step"])) >= step:
                    step = found + 1
                    yield line
            return
        except Unreachable as unreachable:
            away.wait(unreachable)


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
    """Yield the workers' lines after `behind`, and new ones until the job ends.

    The position is updated. Raise CommandFailed.
    """
    away = Away()
    away.answered()
    while True:
        since = behind.again()
        try:
            for line in master.logs(job_id, follow=True, node=node, rank=rank, since=since):
                away.answered()
                if behind.is_new(line):
                    yield line
            return
        except Unreachable as unreachable:
            away.wait(unreachable)


def follow_status(
    master: MasterClient, job_id: str, tell: Callable[[str], None], *, patience_s: float = AWAY_S
) -> Iterator[pb.JobStatus]:
    """Yield each status of the job until it has ended. The master has answered before.

    Raise CommandFailed.
    """
    away = Away(tell, patience_s=patience_s)
    away.answered()
    while True:
        try:
            for status in master.watch(job_id):
                away.answered()
                yield status
                if status.state in text.ENDED:
                    return
        except Unreachable as unreachable:
            away.wait(unreachable)


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


# ---- a live line of progress, with events above it


#: Interval of lines if the output is not a terminal.
LINE_EVERY_S = 1.0
#: Rank of a part that is never left out.
_MUST = 0


class LiveLine:
    """Writer of progress: one live line on a terminal, else a line per second or change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._drawn = ""
        self._state = ""
        self._printed_at = float("-inf")
        #: Threads that follow other streams print lines above.
        self._lock = threading.Lock()

    @property
    def width(self) -> int | None:
        """Width of a line, one column less than the terminal, which may scroll after its last.

        None: unlimited.
        """
        return shutil.get_terminal_size().columns - 1 if self._live else None

    def status(self, status: pb.JobStatus, now: float) -> None:
        line = progress_line(status, self.width)
        state = f"{status.state} {status.generation} {status.reason}"
        with self._lock:
            if self._live:
                self._rewrite(line)
            elif line != self._drawn and (
                state != self._state or now - self._printed_at >= LINE_EVERY_S
            ):
                self._print(line)
                self._printed_at = now
                self._drawn = line
            self._state = state

    def above(self, line: str) -> None:
        """Print a permanent line above the live line."""
        with self._lock:
            if not self._live:
                self._print(line)
                return
            drawn = self._drawn
            self._rewrite("")
            self._print(line)
            self._rewrite(drawn)

    def finish(self) -> None:
        if self._live and self._drawn:
            self._print("")

    def _print(self, line: str) -> None:
        self._out.write(line + "\n")
        self._out.flush()

    def _rewrite(self, line: str) -> None:
        self._out.write("\r\x1b[K" + line[: self.width])
        self._out.flush()
        self._drawn = line


def progress_line(status: pb.JobStatus, width: int | None = None) -> str:
    """Return a line about the job's progress.

    If it exceeds `width`, leave out the least important parts, then cut it.
    """
    parts = list(_parts(status))
    while width is not None and len(_line(parts)) > width and max(parts)[0] > _MUST:
        parts.remove(max(parts))
    line = _line(parts)
    return line if width is None else cut(line, width)


def _parts(status: pb.JobStatus) -> Iterator[tuple[int, str]]:
    """Yield parts in the line's order, each with a rank: the highest rank is left out first."""
    yield _MUST, inline(status.state)
    yield _MUST, f"step {status.committed_step}/{status.steps}"
    if again := text.redoing(status):
        yield _MUST, again
    if status.HasField("loss"):
        yield 2, f"loss {status.loss:.4f}"
    if status.skipped_steps:
        yield 5, f"{status.skipped_steps} skipped"
    if status.HasField("evaluation"):
        yield 4, f"held out {text.evaluation(status.evaluation)}"
    if status.tokens_per_s:
        yield 3, f"{status.tokens_per_s:,.0f} tokens/s"
    if still := text.last_step(status, "last step "):
        yield 3, still
    if status.HasField("plan"):
        nodes = sum(len(pipeline.nodes) for pipeline in status.plan.pipelines)
        shape = " + ".join(str(len(pipeline.nodes)) for pipeline in status.plan.pipelines)
        yield 6, f"{count(nodes, 'node')} ({shape})"
        yield 7, f"generation {status.generation}"
    if status.eta_s and status.state not in text.ENDED:
        yield 1, f"{text.about(status.eta_s)} to go"
    if status.reason:
        yield _MUST, f"({inline(status.reason)})"


def _line(parts: Iterable[tuple[int, str]]) -> str:
    return "  ".join(part for _, part in parts)


def follow(master: MasterClient, job_id: str, out: TextIO = sys.stdout) -> pb.JobStatus:
    """Show progress until the job has ended; return its last status."""
    progress = LiveLine(out)
    last = pb.JobStatus()
    statuses = follow_status(master, job_id, progress.above)
    # The stream of statuses reports an absence of the master.
    events = follow_events(master, job_id, answered=True, tell=ignore)
    try:
        for item in merged({"status": statuses, "event": events}):
            match item:
                case ("status", pb.JobStatus() as last) if last.state not in text.ENDED:
                    progress.status(last, time.monotonic())
                case ("event", pb.EventRecord(json=record)):
                    progress.above(event_line(json.loads(record), progress.width))
                case _:
                    pass
        # The final state is drawn below all events, which may arrive after it.
        progress.status(last, time.monotonic())
        return last
    finally:
        progress.finish()

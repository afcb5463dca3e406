"""Watching one job until it ends: a live line of progress, with events above it.

Threads read two streams of the master (status and events), and one thread draws. Training continues
if the master goes away, so this waits a while for its return.
"""

import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.away import Away
from oobleck.cli.output import text
from oobleck.cli.output.events import event_line
from oobleck.cli.output.table import cut
from oobleck.core.units import count
from oobleck.host.command import CommandFailed
from oobleck.host.display import inline
from oobleck.proto import control_pb2 as pb

#: Interval of lines if the output is not a terminal.
LINE_EVERY_S = 1.0
#: Rank of a part that is never left out.
_MUST = 0


@dataclass(frozen=True, slots=True)
class _Status:
    status: pb.JobStatus


@dataclass(frozen=True, slots=True)
class _Event:
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Closed:
    error: CommandFailed | None


class LiveLine:
    """Writer of progress: one live line on a terminal, else a line per second or change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._drawn = ""
        self._state = ""
        self._printed_at = float("-inf")

    @property
    def width(self) -> int | None:
        """Width of a line, one column less than the terminal, which may scroll after its last.

        None: unlimited.
        """
        return shutil.get_terminal_size().columns - 1 if self._live else None

    def status(self, status: pb.JobStatus, now: float) -> None:
        line = progress_line(status, self.width)
        state = f"{status.state} {status.generation} {status.reason}"
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
    away, shown = Away(progress.above), 0
    away.answered()
    last: pb.JobStatus | None = None
    try:
        while True:
            events_seen = 0
            lost: Unreachable | None = None
            for item in _both_streams(master, job_id):
                match item:
                    case _Status(status=last):
                        away.answered()
                        if last.state not in text.ENDED:
                            progress.status(last, time.monotonic())
                    case _Event(record=record):
                        events_seen += 1
                        if events_seen > shown:
                            shown = events_seen
                            progress.above(event_line(record, progress.width))
                    case _Closed(error=Unreachable() as error):
                        lost = error
                    case _Closed(error=CommandFailed() as failure):
                        raise failure
                    case _Closed():
                        pass
            if last is not None and last.state in text.ENDED:
                # The final state is drawn below all events, which may arrive after it.
                progress.status(last, time.monotonic())
                return last
            if lost is not None:
                away.wait(lost)
    finally:
        progress.finish()


def _both_streams(master: MasterClient, job_id: str) -> Iterator[_Status | _Event | _Closed]:
    """Yield the items of both streams until both have closed."""
    items: queue.Queue[_Status | _Event | _Closed] = queue.Queue(maxsize=1000)
    watch = master.watch(job_id)
    events = master.events(job_id, follow=True)
    _pump((_Status(status) for status in watch), items.put)
    _pump((_Event(json.loads(event.json)) for event in events), items.put)
    open_streams = 2
    while open_streams:
        item = items.get()
        if isinstance(item, _Closed):
            open_streams -= 1
        yield item


def _pump(source: Iterator[Any], put: Callable[[Any], None]) -> None:
    def run() -> None:
        try:
            for item in source:
                put(item)
        except CommandFailed as error:
            put(_Closed(error))
        else:
            put(_Closed(None))

    threading.Thread(target=run, daemon=True).start()

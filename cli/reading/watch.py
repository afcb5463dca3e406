"""Display of the master's answers: once, repeatedly with `--watch`, or a job's progress in a line.

Owns when the master is asked, and how answers replace each other on a terminal.
"""

import json
import math
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.follow import Away, follow_events, follow_status, ignore, merged, warn
from oobleck.cli.output.events import event_line
from oobleck.cli.output.table import coloured, cut, is_terminal, wants_colour
from oobleck.cli.output.text import ENDED, Form, document, entry, is_data, moment
from oobleck.cli.view.state import progress_line
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

_CLEAR_LINE_END = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_CLEAR_ALL = "\x1b[H\x1b[2J"


class Screen:
    def __init__(self, out: TextIO, paint: Callable[[str], str] = str) -> None:
        """Prepare an empty screen. `paint`: adds colours to a block, and no characters."""
        self._out = out
        self._paint = paint
        self._lines = 0
        self._size: tuple[int, int] | None = None

    def draw(self, block: str) -> None:
        """Draw the block, cut to the terminal's size; the last line reports hidden lines."""
        size = shutil.get_terminal_size()
        lines = block.split("\n")
        room = max(1, size.lines - 1)  # the cursor is in the line below
        if len(lines) > room:
            hidden = len(lines) - (room - 1)
            lines = [*lines[: room - 1], f"… {hidden} more lines; make the terminal higher"]
        lines = [cut(line, size.columns) for line in lines]
        painted = self._paint("\n".join(lines)).split("\n")
        # A line that fills the width has nothing to clear behind it, and clearing would erase its
        # end.
        ends = ["" if len(line) == size.columns else _CLEAR_LINE_END for line in lines]
        drawn = "".join(f"{line}{end}\n" for line, end in zip(painted, ends, strict=True))
        self._out.write(f"{self._start(size)}{drawn}{_CLEAR_BELOW}")
        self._out.flush()
        self._lines, self._size = len(lines), size

    def finish(self) -> None:
        """Keep the last block, and clear input echoed meanwhile, such as ^C."""
        if self._lines:
            self._out.write(f"\r{_CLEAR_BELOW}")
            self._out.flush()

    def _start(self, size: tuple[int, int]) -> str:
        """Return the escape that moves the cursor to the start of the last block."""
        if not self._lines:
            return ""
        if size != self._size:  # lines may have been folded, so the start is unknown
            return _CLEAR_ALL
        return f"\r\x1b[{self._lines}A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the master, for programs and for people."""

    data: object
    #: Computed when it is shown, because it depends on the terminal's width.
    text: Callable[[], str]
    #: Whether no other answer can follow.
    last: bool = False


def show(
    endpoint: Endpoint, ask: Callable[[MasterClient], Answer], form: Form, watch_s: float | None
) -> None:
    """Print the answer; with `watch_s`, ask again after so many seconds, until the last one. Raise
    CommandFailed."""
    with MasterClient(endpoint) as connection:
        if watch_s is None:
            answer = ask(connection)
            _warn(connection.problem)
            click.echo(document(answer.data, form) if is_data(form) else _painted(answer.text()))
        elif is_terminal() and not is_data(form):
            _redraw(connection, ask, watch_s)
        else:
            _append(connection, ask, form, watch_s)


def _redraw(
    connection: MasterClient, ask: Callable[[MasterClient], Answer], watch_s: float
) -> None:
    screen = Screen(sys.stdout, _painted)
    shown = ""

    def tell(line: str) -> None:
        screen.draw(f"{moment(time.time())}  {line}\n\n{shown}")

    try:
        for answer in _answers(connection, ask, watch_s, tell):
            warning = f"warning: {inline(connection.problem)}\n\n" if connection.problem else ""
            shown = f"{warning}{answer.text()}"
            screen.draw(f"{moment(time.time())}\n\n{shown}")
    finally:
        screen.finish()


def _append(
    connection: MasterClient, ask: Callable[[MasterClient], Answer], form: Form, watch_s: float
) -> None:
    """Print each answer below the previous one."""
    problem = ""
    for answer in _answers(connection, ask, watch_s, warn):
        if connection.problem != problem:
            problem = connection.problem
            _warn(problem)
        if is_data(form):
            click.echo(entry(answer.data, form))
        else:
            click.echo(f"{moment(time.time())}\n{_painted(answer.text())}\n")
        sys.stdout.flush()


def _answers(
    connection: MasterClient,
    ask: Callable[[MasterClient], Answer],
    watch_s: float,
    tell: Callable[[str], None],
) -> Iterator[Answer]:
    """Yield answers. Raise Unreachable if the first call fails; wait without limit for later
    ones."""
    away = Away(tell, patience_s=math.inf)
    while True:
        due = time.monotonic() + watch_s
        try:
            answer = ask(connection)
        except Unreachable as unreachable:
            away.wait(unreachable)
            continue
        away.answered()
        yield answer
        if answer.last:
            return
        time.sleep(max(0.0, due - time.monotonic()))


def _painted(text: str) -> str:
    return coloured(text) if wants_colour() else text


def _warn(problem: str) -> None:
    """Print the master's own problem to standard error, because programs may read the answer."""
    if problem:
        click.echo(f"warning: {inline(problem)}", err=True)


# ---- a live line of progress, with events above it


#: Interval of lines if the output is not a terminal.
LINE_EVERY_S = 1.0


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
        None: unlimited."""
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
                case ("status", pb.JobStatus() as last) if last.state not in ENDED:
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

"""Display of the master's answers: once, or repeatedly with `--watch`.

Owns when the master is asked, and how answers replace each other on a terminal. Must not know their
content.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

import click

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.follow import Away, warn
from oobleck.cli.output.table import coloured, cut, is_terminal, wants_colour
from oobleck.cli.output.text import Form, document, entry, is_data, moment
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint

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

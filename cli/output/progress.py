"""Progress of a command that waits: on a terminal one line that is rewritten, else a line for each
change."""

import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from oobleck.cli.output.table import cut
from oobleck.host.display import inline

_BAR = 20
#: Time after which a terminal shows what takes so long.
_SILENT_S = 1.0


@contextmanager
def shown_if_long(line: str) -> Iterator[None]:
    """Print `line` to standard error, if that is a terminal and the block takes longer than a
    second."""

    def say() -> None:
        sys.stderr.write(f"oobleck: {inline(line)}\n")
        sys.stderr.flush()

    timer = threading.Timer(_SILENT_S, say)
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class OneLine:
    """Line of progress."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        #: Whether the line is rewritten.
        self.live = out.isatty()
        self._drawn = ""

    def show(self, line: str) -> None:
        """Show the line in place of the one before, or below it in a pipe, if it differs."""
        line = inline(line)
        if line == self._drawn:
            return
        if self.live:
            width = shutil.get_terminal_size().columns - 1  # terminals may scroll after the last
            self._out.write("\r\x1b[K" + cut(line, width))
        else:
            self._out.write(f"{line}\n")
        self._out.flush()
        self._drawn = line

    def finish(self) -> None:
        """Keep the line."""
        if self.live and self._drawn:
            self._out.write("\n")
            self._out.flush()
        self._drawn = ""


class Progress:
    """Progress of work on hosts at the same time."""

    def __init__(self, names: list[str], out: TextIO, tell: Callable[[str], None]) -> None:
        """`out`: for the line of progress. `tell`: prints a line that stays."""
        self._line = OneLine(out)
        self._tell = tell
        self._width = max(map(len, names))
        self._number = len(names)
        #: Current work, by host.
        self._doing: dict[str, str] = {}
        self._done = self._failed = 0

    def begins(self, name: str, work: str) -> None:
        if self._line.live:
            self._doing[name] = work
            self._draw()
        else:
            self._line.show(f"{name:<{self._width}}  {work}")

    def ended(self, name: str, line: str, *, failed: bool) -> None:
        """Print the host's result above the progress of the others."""
        self._doing.pop(name, None)
        self._done += 1
        self._failed += failed
        if self._line.live:
            self._line.show("")
        self._tell(inline(f"{name:<{self._width}}  {line}"))
        if self._line.live and self._done < self._number:
            self._draw()

    def _draw(self) -> None:
        full = _BAR * self._done // self._number
        failed = f", {self._failed} failed" if self._failed else ""
        doing = Counter(self._doing.values()).most_common()
        now = ", ".join(f"{number} {work}" for work, number in doing)
        bar = "#" * full + "." * (_BAR - full)
        self._line.show(f"[{bar}] {self._done}/{self._number}{failed}  {now}")

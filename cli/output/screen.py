"""A block of text on a terminal that is drawn again in place.

Each block is written over the last one in a single write, and only what is left of the old one is
cleared, so that nothing flickers. No mode of the terminal is changed: however the process ends,
there is nothing to put back.
"""

import shutil
from collections.abc import Callable
from typing import TextIO

from oobleck.cli.output.table import cut

_CLEAR_LINE_END = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_CLEAR_ALL = "\x1b[H\x1b[2J"


class Screen:
    def __init__(self, out: TextIO, paint: Callable[[str], str] = str) -> None:
        """`paint`: adds colours to what is drawn, and no characters."""
        self._out = out
        self._paint = paint
        self._lines = 0
        self._size: tuple[int, int] | None = None

    def draw(self, block: str) -> None:
        """Draw the block. Cut off what is too wide or too high for the terminal; the last line says
        so."""
        size = shutil.get_terminal_size()
        lines = block.split("\n")
        room = max(1, size.lines - 1)  # the cursor stands in the line below
        if len(lines) > room:
            hidden = len(lines) - (room - 1)
            lines = [*lines[: room - 1], f"… {hidden} more lines; they need a higher terminal"]
        lines = [cut(line, size.columns) for line in lines]
        painted = self._paint("\n".join(lines)).split("\n")
        # A line that ends in the last column has nothing to clear behind it, and would lose it.
        ends = ["" if len(line) == size.columns else _CLEAR_LINE_END for line in lines]
        drawn = "".join(f"{line}{end}\n" for line, end in zip(painted, ends, strict=True))
        self._out.write(f"{self._start(size)}{drawn}{_CLEAR_BELOW}")
        self._out.flush()
        self._lines, self._size = len(lines), size

    def finish(self) -> None:
        """The last block stays. What was typed meanwhile, such as ^C, is cleared."""
        if self._lines:
            self._out.write(f"\r{_CLEAR_BELOW}")
            self._out.flush()

    def _start(self, size: tuple[int, int]) -> str:
        """Puts the cursor where the last block began."""
        if not self._lines:
            return ""
        if size != self._size:  # lines may have been folded, so nobody knows where that is
            return _CLEAR_ALL
        return f"\r\x1b[{self._lines}A"

"""Tables on a terminal: columns that fit its width, without those that say nothing. Pure, but for
`terminal_width`."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oobleck.host.display import inline

#: A column of text narrower than this is not readable.
_NARROWEST = 24
#: A name is cut to no less.
_SHORTEST_NAME = 8
#: What a cell without a value holds.
_NOTHING = frozenset({"", "-"})


def terminal_width() -> int | None:
    """How wide a table may be: a pipe or a file takes any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a listing, made of each thing that is listed."""

    head: str
    cell: Callable[[Any], object]
    #: Only a wide listing has it.
    wide: bool = False


def listing(
    columns: Sequence[Column], found: Sequence[Any], *, width: int | None, wide: bool
) -> str:
    """A line for each of `found`; empty without any. A column that says nothing of any of them is
    left out; a wide listing has every column, whatever its width."""
    if not found:
        return ""
    made = {
        column.head: [column.cell(one) for one in found]
        for column in columns
        if wide or not column.wide
    }
    if not wide:
        made = {head: cells for head, cells in made.items() if not set(cells) <= _NOTHING}
    return table([*made], zip(*made.values(), strict=True), width=None if wide else width)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None
) -> str:
    """Columns as wide as their widest cell; a column of numbers is aligned to the right.

    Where that is wider than `width`, a last column of prose is wrapped: under its head if there is
    room, else below its row. What is still too wide is cut.
    """
    cells = [[inline(str(cell)) for cell in row] for row in rows]
    lines = _lines(heads, cells)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    if max(len(row[-1]) for row in cells) < _NARROWEST:
        return "\n".join(_lines(heads, _cut(heads, cells, width)))
    short = _lines(heads[:-1], _cut(heads[:-1], [row[:-1] for row in cells], width))
    indent = 2 + max(map(len, short))
    below = width - indent < _NARROWEST
    if below:
        indent = 4
    else:
        short = [line.ljust(indent - 2) for line in short]
        short[0] = f"{short[0]}  {heads[-1]}"
    out = [short[0]]
    for line, row in zip(short[1:], cells, strict=True):
        wrapped = _wrapped(row[-1], max(_NARROWEST, width - indent))
        if not below and wrapped:
            line = f"{line}  {wrapped.pop(0)}"
        out += [line.rstrip(), *(" " * indent + more for more in wrapped)]
    return "\n".join(out)


def _cut(heads: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The cells, with the longest names shortened until a line fits; numbers stay whole."""
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    names = [index for index in range(len(heads)) if not _are_numbers(row[index] for row in cells)]
    too_wide = sum(widths) + 2 * (len(widths) - 1) - width
    while too_wide > 0 and names:
        widest = max(names, key=widths.__getitem__)
        if widths[widest] <= max(_SHORTEST_NAME, len(heads[widest])):
            break
        widths[widest] -= 1
        too_wide -= 1
    return [[cut(cell, most) for cell, most in zip(row, widths, strict=True)] for row in cells]


def cut(line: str, most: int) -> str:
    """`line`, or its beginning with `…` where it is longer than `most` characters."""
    return line if len(line) <= most else line[: max(0, most - 1)] + "…"


def folded(line: str, width: int | None, *, indent: int = 0) -> str:
    """`line`, where it is longer than `width` continued below, behind `indent` spaces."""
    if width is None or len(line) <= width:
        return line
    return "\n".join(_wrapped(line, max(width, indent + _NARROWEST), indent))


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most `width`; names with hyphens stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _lines(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    right = [bool(cells) and _are_numbers(row[i] for row in cells) for i in range(len(heads))]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [list(heads), *cells]
    ]


def _are_numbers(cells: Iterable[str]) -> bool:
    return all(re.fullmatch(r"-|[0-9][0-9,]*(\.[0-9]+)?", cell) for cell in cells)

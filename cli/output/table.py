"""Tables on a terminal: columns that fit its width, without those that say nothing. Pure, but for
`terminal_width`."""

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oobleck.host.display import inline

#: A column of text narrower than this is not readable.
_NARROWEST = 24
#: Spaces before what stands below its row.
_BELOW = 4
#: What a cell without a value holds.
_NOTHING = frozenset({"", "-"})


def terminal_width() -> int | None:
    """Return the width that a table may have; None: a pipe or a file takes any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a listing, made of each thing that is listed."""

    head: str
    cell: Callable[[Any], object]
    #: Only a wide listing has it.
    wide: bool = False
    #: Left out where rows would be wider than the terminal.
    spare: bool = False


def listing(
    columns: Sequence[Column], found: Sequence[Any], *, width: int | None, wide: bool
) -> str:
    """A line for each of `found`; empty without any. A column that says nothing of any of them is
    left out; a wide listing has every column, whatever its width."""
    if not found:
        return ""
    chosen = [column for column in columns if wide or not column.wide]
    made = {column: [str(column.cell(one)) for one in found] for column in chosen}
    if not wide:
        made = {column: cells for column, cells in made.items() if not set(cells) <= _NOTHING}
        if width is not None and _row_width(made) > width:
            made = {column: cells for column, cells in made.items() if not column.spare}
    heads = [column.head for column in made]
    return table(heads, zip(*made.values(), strict=True), width=None if wide else width)


def _row_width(made: Mapping[Column, Sequence[str]]) -> int:
    """Return the least width of a row: its last column, which may be prose, can be wrapped."""
    widths = [max(len(column.head), *map(len, cells)) for column, cells in made.items()]
    return sum(widths) + 2 * (len(widths) - 1) - max(0, widths[-1] - _NARROWEST)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], *, width: int | None = None
) -> str:
    """Columns as wide as their widest cell; a column of numbers is aligned to the right.

    Where that is wider than `width`, a last column of prose is wrapped: under its head if there is
    room, else below its row. If the others are still too wide, a row goes on below. Nothing is cut:
    a name is there to be given to the next command.
    """
    cells = [[inline(str(cell)) for cell in row] for row in rows]
    lines = _lines(heads, cells)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    prose = [row[-1] for row in cells]
    if max(map(len, prose)) < _NARROWEST:
        return "\n".join(line for row in _stacked(heads, cells, width) for line in row)
    others = heads[:-1], [row[:-1] for row in cells]
    short = _lines(*others)
    indent = 2 + max(map(len, short))
    if width - indent < max(_NARROWEST, *map(longest_word, prose)):
        stacked = _stacked(*others, width)
        room = max(_NARROWEST, width - _BELOW)
        below = [[], *(wrapped(text, room) for text in prose)]
        return "\n".join(
            line
            for row, more in zip(stacked, below, strict=True)
            for line in [*row, *(" " * _BELOW + text for text in more)]
        )
    out = [f"{short[0].ljust(indent)}{heads[-1]}"]
    for line, text in zip(short[1:], prose, strict=True):
        first, *more = wrapped(text, width - indent) or [""]
        out += [f"{line.ljust(indent)}{first}".rstrip(), *(" " * indent + text for text in more)]
    return "\n".join(out)


def _stacked(heads: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The lines of the heads and of each row: as many columns as fit, then the next ones below."""
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    blocks = []
    for columns in grouped(widths, width, width - _BELOW):
        several = [[row[index] for index in columns] for row in [heads, *cells]]
        blocks.append(_lines(several[0], several[1:]))
    return [
        [first, *(" " * _BELOW + line for line in more if line)]
        for first, *more in zip(*blocks, strict=True)
    ]


def grouped(widths: Sequence[int], room: int, room_below: int) -> list[list[int]]:
    """Columns of such widths side by side, two spaces apart: as many as there is room for, then
    below them the next ones."""
    groups: list[list[int]] = [[]]
    used = 0
    for index, wide in enumerate(widths):
        used += wide + (2 if groups[-1] else 0)
        if groups[-1] and used > (room if len(groups) == 1 else room_below):
            groups.append([])
            used = wide
        groups[-1].append(index)
    return groups


def longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def cut(line: str, most: int) -> str:
    """`line`, or its beginning with `…` where it is longer than `most` characters."""
    return line if len(line) <= most else line[: max(0, most - 1)] + "…"


def folded(line: str, width: int | None, *, indent: int = 0) -> str:
    """`line`, where it is longer than `width` continued below, behind `indent` spaces."""
    if width is None or len(line) <= width:
        return line
    return "\n".join(wrapped(line, max(width, indent + _NARROWEST), indent))


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Lines of at most `width`, all but the first behind `indent` spaces; names with hyphens stay
    whole."""
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
    return all(re.fullmatch(r"-|[0-9][0-9,]*(\.[0-9]+)?%?", cell) for cell in cells)

"""Tables on a terminal, and the colours of states there: exceptional ones stand out.

A column without values is left out, and columns fit the terminal's width. Pages have tones in place
of colours. Pure, except for the checks of the terminal.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from oobleck.host.display import inline

#: Narrowest readable column of text.
_NARROWEST = 24
#: Indent of text below its row.
_BELOW = 4
#: Content of a cell without a value.
_NOTHING = frozenset({"", "-"})


def terminal_width() -> int | None:
    """Return the width that a table may have; None: unlimited, for a pipe or a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a listing, with a cell for each listed thing."""

    head: str
    cell: Callable[[Any], object]
    #: Whether only a wide listing has it.
    wide: bool = False
    #: Whether it is left out if rows would exceed the terminal.
    spare: bool = False


def listing(
    columns: Sequence[Column], found: Sequence[Any], *, width: int | None, wide: bool
) -> str:
    """Format a line for each of `found`; empty without any.

    Columns without any value are left out; a wide listing has every column, whatever its width.
    """
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
    """Format columns as wide as their widest cell; columns of numbers are right-aligned.

    If the table exceeds `width`, a last column of prose is wrapped: under its head if there is
    room, otherwise below its row. If the others are still too wide, a row continues below. Nothing
    is cut, because names are needed for the next command.
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
    """Return the lines of the heads and of each row: columns that fit, then the others below."""
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
    """Group columns of these widths: as many as fit side by side, then the next ones. They are two
    spaces apart."""
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
    """Return `line`, or its beginning and `…` if it is longer than `most` characters."""
    return line if len(line) <= most else line[: max(0, most - 1)] + "…"


def folded(line: str, width: int | None, *, indent: int = 0) -> str:
    """Return `line`; if it is longer than `width`, continued below with `indent` spaces."""
    if width is None or len(line) <= width:
        return line
    return "\n".join(wrapped(line, max(width, indent + _NARROWEST), indent))


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Return lines of at most `width`, all but the first indented; hyphenated names stay whole."""
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


# ---- colours and tones


_COLOURS = {
    "green": ("running", "succeeded", "live"),
    "yellow": (
        *("reconfiguring", "waiting for nodes", "draining", "drained", "disconnected"),
        "quarantined",
    ),
    "red": ("failed", "cancelled", "lost", "held"),
}
#: Colour of a state of a job or a node; ordinary states have none.
COLOUR_OF = {state: colour for colour, states in _COLOURS.items() for state in states}
#: A state is the second word: after the name in a listing, or after `state` of one job.
_STATE = re.compile(
    rf"^(\S+ +)({'|'.join(sorted(COLOUR_OF, key=len, reverse=True))})(?=:|\s|$)", re.MULTILINE
)


def is_terminal() -> bool:
    """Return whether standard output is a terminal that obeys escapes."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def wants_colour() -> bool:
    """Return whether standard output shows colours; a non-empty NO_COLOR disables them. See
    https://no-color.org."""
    return is_terminal() and not os.environ.get("NO_COLOR")


def coloured(text: str) -> str:
    """Return `text` with the states of jobs and nodes coloured."""
    return _STATE.sub(lambda found: found[1] + click.style(found[2], COLOUR_OF[found[2]]), text)


#: - `good`: as wanted
#: - `warn`: worth a look
#: - `bad`: failed
#: - `quiet`: neutral
Tone = Literal["good", "warn", "bad", "quiet"]

_OF_COLOUR: dict[str, Tone] = {"green": "good", "yellow": "warn", "red": "bad"}
#: Worst first.
ORDER: tuple[Tone, ...] = ("bad", "warn", "quiet", "good")


def tone(state: str) -> Tone:
    """Return the tone of a job's or a node's state."""
    return _OF_COLOUR.get(COLOUR_OF.get(state, ""), "quiet")


def worst(*tones: Tone) -> Tone:
    return min(tones, key=ORDER.index, default="quiet")

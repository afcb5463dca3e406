"""Panes of `oobleck top`: their text as rows of styled text, and the scrolling lists of rows.

A style is a word or two of Rich: `bold`, `dim`, or one of the terminal's own colours. The text is
complete without colours.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.widgets import OptionList

from oobleck.cli.output.events import how_it_ended
from oobleck.cli.output.metrics import plot
from oobleck.cli.output.table import Tone, cut, tone
from oobleck.cli.output.text import GONE, about, progress_line
from oobleck.cli.top.feed import View
from oobleck.cli.view.feeds import Trouble
from oobleck.cli.view.series import Point
from oobleck.cli.view.state import (
    Cluster,
    NodeRow,
    Place,
    PlanRow,
    open_incident,
    plan_rows,
    progress,
)
from oobleck.core.units import count
from oobleck.host.display import inline

#: Text and its style.
Part = tuple[str, str]
Row = tuple[Part, ...]

_STYLES: Mapping[Tone, str] = {"good": "green", "warn": "yellow", "bad": "bold red", "quiet": ""}
_OUTCOMES = {"recovered": "green", "succeeded": "green", "failed": "bold red"}
_LONGEST_NAME = 20
#: Width of the clock in front of an event.
_CLOCK = 12
#: Lowest plot: a line of dots, and one of steps.
_LOWEST = 2


def width_of(row: Row) -> int:
    return sum(len(text) for text, _ in row)


def fitted(row: Iterable[Part], width: int) -> Row:
    """Return `row`, or its beginning and `…` if it is longer than `width`."""
    found: list[Part] = []
    parts = list(row)
    for number, (text, style) in enumerate(parts):
        last = not any(text for text, _ in parts[number + 1 :])
        if len(text) > width or (len(text) == width and not last):
            return (*found, (cut(f"{text} ", width), style))
        found.append((text, style))
        width -= len(text)
    return tuple(found)


# ---- the head of the page


def head(view: View, cluster: Cluster, address: str, width: int, now: float) -> Row:
    """Return the top row: the master's address, its state or its nodes', and the time."""
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    room, state = max(0, width - len(clock) - 2), tuple(_state(view, cluster, now))
    name = cut(address, max(0, room - width_of((("oobleck    ", ""), *state))))
    left = fitted((("oobleck", "bold"), (f"  {name}  " if name else "  ", ""), *state), room)
    return fitted((*left, (" " * (width - len(clock) - width_of(left)), ""), (clock, "")), width)


def _state(view: View, cluster: Cluster, now: float) -> Iterator[Part]:
    match view.trouble:
        case Trouble(away=True, since=since):
            yield (
                f"the master is away for {about(max(0.0, now - since))}; jobs continue",
                "bold red",
            )
        case None if view.problem:
            yield inline(view.problem), "bold yellow"
        case None:
            for number, (state, nodes) in enumerate(cluster.states.items()):
                yield ", " if number else "", ""
                yield f"{nodes} {inline(state)}", _STYLES[tone(state)]
            yield "" if cluster.states else "no nodes", ""
        case trouble:
            yield inline(trouble.line), "bold red"


def job(view: View, width: int) -> tuple[Row, Row]:
    """Return two rows: the job's progress, and how many losses it can survive."""
    found = view.job
    if found is None:
        return (("no jobs; queue one with 'oobleck submit JOB.yaml'", "dim"),), ()
    name = f"{inline(found.job_id)}  "
    line = progress_line(found, max(1, width - len(name)))
    state, _, rest = line.partition("  ")
    first = (name, "bold"), (state, _STYLES[tone(found.state)]), (f"  {rest}", "")
    return fitted(first, width), fitted(_prospects(view), width)


def _prospects(view: View) -> Iterator[Part]:
    found = view.job
    assert found is not None, "there is a job"
    how = progress(found)
    yield f"{how.percent} done  ", ""
    if how.can_lose:
        style = "" if found.can_lose else "bold yellow"
        yield f"can lose {count(found.can_lose, 'more node')}  ", style
    if found.save_failure:
        yield f"not saved: {inline(found.save_failure)}  ", "bold red"
    elif how.checkpoint:
        yield f"checkpoint {inline(how.checkpoint)}  ", ""
    if view.history.goodput is not None:
        yield f"goodput {100 * view.history.goodput:.1f}%  ", ""
    if found.plan_policy:
        then = f", then {found.then}" if found.then else ""
        yield inline(f"plan by policy {found.plan_policy}{then}"), "dim"


# ---- nodes and the map of the plan


def nodes(found: Sequence[NodeRow], width: int) -> list[tuple[str, Row]]:
    """Return name and row of each node."""
    wide = min(_LONGEST_NAME, max((len(node.name) for node in found), default=0))
    states = max((len(node.state) for node in found), default=0)
    return [(node.name, fitted(_node(node, wide, states), width)) for node in found]


def _node(node: NodeRow, wide: int, states: int) -> Iterator[Part]:
    yield f"{cut(inline(node.name), wide):<{wide}}  ", ""
    yield f"{inline(node.state):<{states}}  ", _STYLES[tone(node.state)]
    yield node.workers, ""
    if node.pace:
        yield f"  pace {inline(node.pace)}", "yellow"
    if node.silent and node.state not in GONE:
        yield f"  heard {node.silent}", "yellow"
    if node.reason:
        yield f"  {inline(node.reason)}", "dim"


def pipelines(view: View, width: int) -> list[Row]:
    """Return a row for each pipeline or route, with a cell for each stage.

    A cell has the workers and layers, or only the workers, or only a mark, as the width permits.
    """
    if view.job is None or not view.job.HasField("plan"):
        return []
    found = plan_rows(view.job.plan, view.nodes)
    heads = [_head_of(row) for row in found]
    wide = max(map(len, heads), default=0)
    most = max((len(row.places) for row in found), default=0)
    cells: list[list[str]] = []
    cell = 0
    for write in (_with_layers, lambda place: inline(place.workers), lambda place: "■"):
        cells = [[write(place) for place in row.places] for row in found]
        cell = max((len(text) for row in cells for text in row), default=0)
        if wide + most * (cell + 1) <= width:
            break
    return [
        fitted(
            (
                (f"{head:<{wide}}", "dim"),
                *(
                    (f" {text:<{cell}}", _STYLES[place.tone])
                    for text, place in zip(texts, row.places, strict=True)
                ),
            ),
            width,
        )
        for head, texts, row in zip(heads, cells, found, strict=True)
    ]


def _head_of(row: PlanRow) -> str:
    """Return `0  16 mb` for a pipeline: its number, and its micro-batches per step."""
    kind, _, number = row.name.partition(" ")
    share = row.share.partition(" ")[0]
    if not number:
        return kind
    return f"{number}  {share} mb" if kind == "pipeline" else f"{kind} {number}  {share} mb"


def _with_layers(place: Place) -> str:
    first, last = place.first_layer, place.last_layer
    return (
        f"{inline(place.workers)}[{first}]"
        if first == last
        else (f"{inline(place.workers)}[{first}..{last}]")
    )


# ---- the line of losses


def losses(points: Sequence[Point], width: int, height: int) -> list[str]:
    found = [(point.first, point.loss) for point in points if point.loss is not None]
    if not found or height < _LOWEST:
        return []
    return plot(found, width=width, height=height - 1).split("\n")


# ---- events


def incidents(view: View, width: int) -> list[tuple[str, Row]]:
    """Return number and row of each incident, newest first; an open one before all others."""
    rows = [
        (str(record["incident"]), fitted(_incident(record), width))
        for record in reversed([*view.history.incidents.values()])
    ]
    if view.job is not None and (now := open_incident(view.job)):
        row = ("open  ", "bold red"), (inline(now), "bold")
        rows.insert(0, ("", fitted(row, width)))
    return rows


def _incident(record: Mapping[str, Any]) -> Iterator[Part]:
    ended = inline(record["outcome"])
    yield f"{time.strftime('%H:%M:%S', time.localtime(record['opened_at']))}  ", "dim"
    yield how_it_ended(dict(record), ended), _OUTCOMES.get(ended, "yellow")
    yield f"  {inline(record['root_cause']['summary'])}", ""


def events(view: View, width: int) -> list[Row]:
    return [fitted(((line[:_CLOCK], "dim"), (line[_CLOCK:], "")), width) for line in view.events]


def logs(view: View, width: int) -> list[Row]:
    return [
        fitted(((f"{inline(line.worker)}  ", "dim"), (inline(line.text), "")), width)
        for line in view.lines
    ]


# ---- lists


class Rows(OptionList):
    """List that draws only the visible rows, however many there are; each has a name, which may be
    empty. A row that the user has chosen stays chosen when it moves."""

    DEFAULT_CSS = """
    Rows { scrollbar-size-vertical: 1; overflow-x: hidden; padding: 0; background: transparent; }
    Rows, Rows:focus { border: none; border-top: solid $primary; background-tint: transparent; }
    Rows:focus { border-top: heavy $primary; border-title-style: bold; }
    Rows > .option-list--option { padding: 0; }
    Rows > .option-list--option-highlighted { background: transparent; text-style: none; }
    Rows > .option-list--option-hover { background: transparent; }
    Rows:focus > .option-list--option-highlighted { text-style: reverse; }
    """

    def __init__(self, *, id: str, title: str, follows: bool = False) -> None:
        """Make an empty list. `follows`: show the newest rows, which are the last ones, unless the
        user has chosen another."""
        super().__init__(id=id, markup=False)
        self.border_title = title
        self._rows: Sequence[tuple[str, Row]] = ()
        self._follows = follows

    @property
    def chosen(self) -> str | None:
        """Name of the chosen row; None: the list is empty."""
        return None if self.highlighted is None else self._rows[self.highlighted][0]

    def show(self, rows: Sequence[tuple[str, Row]]) -> None:
        if rows == self._rows:
            return
        at, chosen = self.highlighted or 0, self.chosen
        last = len(self._rows) - 1
        self._rows = rows
        self.set_options(Text.assemble(*row, no_wrap=True) for _, row in rows)
        names = [name for name, _ in rows]
        if self._follows:
            self.highlighted = len(rows) - 1 if at >= last else at
        elif at and chosen in names:
            self.highlighted = names.index(chosen)
        else:
            self.highlighted = min(at, len(rows) - 1) if rows else None

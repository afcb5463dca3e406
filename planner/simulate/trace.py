"""Traces of a cluster: when nodes come, go, get slow or are about to go. Read and written as CSV.

Owns the form of a trace, and which rows contradict each other. Must not know jobs nor plans.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import groupby

#: - add, remove: a node is there from then on, or gone with all that it holds.
#: - slow: its workers compute at this share of the profiled speed; 1: they are well again.
#: - notice: it will be removed after so many seconds, so it is drained. A remove row of the node,
#:   if one follows, says when it really goes.
#: - repair: its worker process has died and is started anew.
EVENTS = ("add", "remove", "slow", "notice", "repair")
_WITH_VALUE = ("slow", "notice")
_COLUMNS = ["time_s", "event", "node", "value"]
#: Latest time, seconds: a hundred years.
LATEST_S = 3.2e9


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a trace."""

    time_s: float
    event: str
    node: str
    #: Rate of `slow`, seconds of `notice`.
    value: float | None = None
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """Events of one time, which are answered as one."""

    time_s: float
    #: Line of its first row.
    line: int
    #: Nodes that go; one of the same name in `added` is a new one.
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    #: Rates of nodes.
    rates: dict[str, float] = field(default_factory=dict)
    noticed: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Changes of a cluster's nodes, in order of time."""

    instants: tuple[Instant, ...]

    @property
    def end_s(self) -> float:
        """Time of the last row, or the end of a later notice."""
        return self.instants[-1].time_s

    def live(self) -> Iterator[tuple[Instant, int]]:
        """Yield each instant with the number of live nodes from then on."""
        count = 0
        for instant in self.instants:
            count += len(instant.added) - len(instant.removed)
            yield instant, count


def parse_rows(text: str) -> Iterator[Row]:
    """Yield the rows of a trace's text. Raises ValueError with the line and the fix."""
    return _rows(text.splitlines())


def trace_of(rows: Iterable[Row]) -> Trace:
    """Return the trace of these rows. Raises ValueError with the line and the fix."""
    present: set[str] = set()
    instants = [
        _instant(time_s, list(own), present)
        for time_s, own in groupby(_with_ends([*_in_order(rows)]), key=lambda row: row.time_s)
    ]
    if not instants:
        raise ValueError("line 1: no rows; give at least the nodes at time 0, as 0,add,n1")
    return Trace(instants=tuple(instants))


def format_trace(rows: Iterable[Row]) -> str:
    """Format rows as the text of a trace."""
    lines = [",".join(_COLUMNS)]
    for row in rows:
        value = "" if row.value is None else f"{row.value:g}"
        lines.append(f"{row.time_s:.3f},{row.event},{row.node},{value}")
    return "\n".join(lines) + "\n"


def _rows(lines: list[str]) -> Iterator[Row]:
    first = lines[0].lstrip("\ufeff").strip().split(",") if lines else []
    if [cell.strip() for cell in first] not in (_COLUMNS, _COLUMNS[:3]):
        raise ValueError(
            "line 1: no header; it must be time_s,event,node or time_s,event,node,value"
        )
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if not 3 <= len(cells) <= 4:
            raise ValueError(f"line {number}: {len(cells)} columns; give {','.join(_COLUMNS)}")
        yield _row(number, *cells)


def _row(number: int, time: str, event: str, node: str, value: str = "") -> Row:
    time_s = _number(time)
    if time_s is None or not 0 <= time_s <= LATEST_S:
        raise ValueError(
            f"line {number}: time_s is {time!r}; give seconds from 0 on, at most {LATEST_S:g}"
        )
    if event not in EVENTS:
        near = get_close_matches(event, EVENTS, 1)
        fix = f"did you mean {near[0]}?" if near else f"give one of {', '.join(EVENTS)}"
        raise ValueError(f"line {number}: unknown event {event!r}; {fix}")
    if not node or not node.isprintable():
        raise ValueError(f"line {number}: node is {node!r}; name the node")
    parsed = _number(value)
    if event not in _WITH_VALUE:
        if value:
            raise ValueError(f"line {number}: {event} takes no value, and has {value!r}; remove it")
    elif event == "slow" and (parsed is None or not 0 < parsed <= 1):
        raise ValueError(
            f"line {number}: the rate is {value!r}; give the share of the profiled speed, above 0 "
            "and at most 1"
        )
    elif event == "notice" and (parsed is None or not 0 <= parsed <= LATEST_S):
        raise ValueError(
            f"line {number}: the notice is {value!r}; give the seconds until the node is removed"
        )
    return Row(time_s, event, node, parsed if event in _WITH_VALUE else None, number)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _in_order(rows: Iterable[Row]) -> Iterator[Row]:
    before_s = 0.0
    for row in rows:
        if row.time_s < before_s:
            raise ValueError(
                f"line {row.line}: goes back in time, from {before_s:g} s to {row.time_s:g} s; "
                "sort the rows by time"
            )
        before_s = row.time_s
        yield row


def _with_ends(rows: Sequence[Row]) -> Iterable[Row]:
    """Return the rows with a remove at the end of each notice that no remove row follows."""
    ends: dict[tuple[str, int], Row] = {}
    removed: dict[str, bool] = {}
    times_added: Counter[str] = Counter()
    for row in reversed(rows):
        match row.event:
            case "remove":
                removed[row.node] = True
            case "add":
                removed[row.node] = False
                times_added[row.node] += 1
            case "notice" if not removed.get(row.node, False):
                assert row.value is not None, "checked by the parser"
                key, at = (row.node, times_added[row.node]), row.time_s + row.value
                if key not in ends or at <= ends[key].time_s:
                    ends[key] = Row(at, "remove", row.node, row.value, row.line)
            case _:
                pass
    # A node may return at the moment its notice ends; its remove must precede that.
    return heapq.merge(
        rows,
        sorted(ends.values(), key=lambda row: (row.time_s, row.line, row.node)),
        key=lambda row: (row.time_s, 0 if row.event == "remove" and row.value else 1),
    )


def _instant(time_s: float, rows: list[Row], present: set[str]) -> Instant:
    """Return the instant of `rows`, and keep the nodes `present` up to date."""
    before = frozenset(present)
    rates: dict[str, float] = {}
    by_event: dict[str, dict[str, None]] = {event: {} for event in EVENTS}
    for row in rows:
        node = row.node
        if row.event == "add":
            if node in present:
                raise ValueError(
                    f"line {row.line}: adds {node}, which is there already; remove it first or "
                    "name another node"
                )
            present.add(node)
            by_event["add"][node] = None
            continue
        if node not in present:
            raise ValueError(
                f"line {row.line}: {row.event} of {node}, which is not there; add it before, as "
                f"0,add,{node}"
            )
        if row.event == "slow":
            assert row.value is not None, "checked by the parser"
            rates[node] = row.value
            continue
        if row.event == "remove":
            present.discard(node)
            rates.pop(node, None)
            for others in by_event.values():
                others.pop(node, None)
            if node not in before:
                continue  # added and removed at the same time
        by_event[row.event][node] = None
    return Instant(
        time_s=time_s,
        line=rows[0].line,
        removed=tuple(by_event["remove"]),
        added=tuple(by_event["add"]),
        rates=rates,
        noticed=tuple(by_event["notice"]),
        repaired=tuple(by_event["repair"]),
    )

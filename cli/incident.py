"""How an incident looks on a terminal: what failed, who saw it, and what it cost. Pure."""

import textwrap
import time
from collections.abc import Iterator
from typing import Any

from oobleck.host.display import inline
from oobleck.planner.units import count, format_bytes

#: Longest list of witnesses; the others are counted.
_MOST_WITNESSES = 8
#: Phases that most incidents have no time in.
_RARE = ("waiting", "redo")
_INDENT = " " * 14
_LABEL = 14
_BOLD, _RED, _GREEN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
_COLOURS = {"recovered": _GREEN, "succeeded": _GREEN, "failed": _RED, "cancelled": _YELLOW}


def block(record: dict[str, Any], *, colour: bool = False, width: int | None = None) -> str:
    """The `incident` record as a headline and lines of label and value below it."""
    lines = [_headline(record, colour)]
    for label, value in _rows(record):
        for number, text in enumerate(_wrap(value, width)):
            head = label if number == 0 else ""
            lines.append(f"{_INDENT}{head:<{_LABEL}}{inline(text)}".rstrip())
    return "\n".join(lines)


def _wrap(value: str, width: int | None) -> list[str]:
    if width is None or "\n" in value:
        return value.split("\n")
    return textwrap.wrap(value, max(30, width - len(_INDENT) - _LABEL)) or [""]


def _headline(record: dict[str, Any], colour: bool) -> str:
    ended, total = inline(record["outcome"]), f"{record['total_s']:.3f} s"
    how = f"recovered in {total}" if ended == "recovered" else f"{ended} after {total}"
    number, cause = f"incident {record['incident']}", inline(record["root_cause"]["summary"])
    if colour:
        number = f"{_BOLD}{number}{_PLAIN}"
        how = f"{_COLOURS.get(ended, '')}{how}{_PLAIN}"
    return f"{clock(record['opened_at'])}  {number}: {cause}; {how}"


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    began = record["opened_at"]
    first, witnesses = record["first_seen"], record["witnesses"]
    if first is not None:
        yield "first seen", f"{_witness(first)}, {clock(first['time'])}"
    for number, seen in enumerate(witnesses[1 : _MOST_WITNESSES + 1]):
        yield (
            ("witnesses" if number == 0 else ""),
            f"{_after(seen['time'] - began)} {_witness(seen)}",
        )
    if len(witnesses) > _MOST_WITNESSES + 1:
        yield "", f"and {len(witnesses) - _MOST_WITNESSES - 1} more"
    for number, other in enumerate(record["also_lost"]):
        why = "because of that" if other["consequence"] else "a failure of its own"
        label = "also" if number == 0 else ""
        yield label, f"{_after(other['time'] - began)} {inline(other['summary'])} ({why})"
    yield from _phases(record)
    if cost := _cost(record):
        yield "cost", cost
    if record["to_generation"]:
        yield "generation", _generations(record)
    if record["outcome"] == "recovered":
        yield "can lose", f"{count(record['can_lose'], 'more node')}, whichever"
    if tail := record["root_cause"]["log_tail"]:
        yield "last words", "\n".join(f"| {inline(line)}" for line in tail)


def _witness(seen: dict[str, Any]) -> str:
    who = {
        "agent": f"agent of {seen['observer']}",
        "peer": f"peer {seen['observer']}",
        "worker": f"worker {seen['observer']} itself",
        "stream": "master",
        "lease": "master, by the lease",
        "progress": "master, by want of progress",
    }.get(seen["by"], f"{seen['by']} {seen['observer']}")
    about = f"{seen['about']}: " if seen["by"] == "stream" else ""
    return f"{who}: {about}{_one_line(seen['saw'])}"


def _one_line(text: str) -> str:
    first, _, rest = text.partition("\n")
    return inline(f"{first} ..." if rest else first)


def _after(span_s: float) -> str:
    return f"+{max(0.0, span_s):.3f} s"


def _phases(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A row of names over rows of seconds: the sums, and before them each generation's where
    there were several."""
    phases: dict[str, float] = {
        name: s for name, s in record["phases"].items() if s or name not in _RARE
    }
    attempts = [a for a in record["attempts"] if a["phases"] is not None]
    if not attempts:
        return
    names = [*phases, "total"]
    widths = [max(8, len(name)) for name in names]
    yield "seconds in", "  ".join(n.rjust(w) for n, w in zip(names, widths, strict=True))
    several = attempts if len(attempts) > 1 else []
    for attempt in several:
        spans = [*(attempt["phases"].get(name, 0.0) for name in phases), attempt["total_s"]]
        yield f" generation {attempt['generation']}"[:_LABEL], _spans(spans, widths)
    yield " all", _spans([*phases.values(), sum(phases.values())], widths)


def _spans(spans: list[float], widths: list[int]) -> str:
    return "  ".join(f"{s:.3f}".rjust(w) for s, w in zip(spans, widths, strict=True))


def _cost(record: dict[str, Any]) -> str:
    parts = []
    if again := record["redo_steps"]:
        steps = ", ".join(map(str, again))
        parts.append(f"step {steps} done again")
        if salvaged := record["salvaged_samples"]:
            parts[-1] += f" but for {count(salvaged, 'sample')}"
    if (more := record["steps_redone"] - len(record["redo_steps"])) > 0:
        parts.append(f"{count(more, 'step')} done again from a checkpoint")
    if record["rolled_forward"]:
        parts.append("a survivor rolled forward")
    if record["received_bytes"]:
        parts.append(f"{format_bytes(record['received_bytes'])} of state moved")
    return ", ".join(parts)


def _generations(record: dict[str, Any]) -> str:
    rules = [f"{attempt['generation']} by {attempt['rule']}" for attempt in record["attempts"]]
    return " -> ".join([str(record["from_generation"]), *rules])


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"

"""Text of an incident for a terminal: cause, witnesses, answer and cost. Pure."""

import time
from collections.abc import Iterator
from typing import Any

from oobleck.cli.output.table import folded, grouped, longest_word, wrapped
from oobleck.core.units import count, format_bytes
from oobleck.host.display import inline

#: Longest list of witnesses, slow workers or plans; the others are counted.
_MOST_LISTED = 8
#: Phases in which most incidents spend no time.
_RARE = ("waiting", "redo")
_INDENT = " " * 14
_LABEL = 14
#: Columns before a value beside its label, and below it.
_VALUES = len(_INDENT) + _LABEL
_BELOW = 4
_BOLD, _RED, _GREEN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"
_COLOURS = {
    "recovered": _GREEN,
    "succeeded": _GREEN,
    "failed": _RED,
    "cancelled": _YELLOW,
    "gone": _YELLOW,
}


def block(record: dict[str, Any], *, colour: bool = False, width: int | None = None) -> str:
    """Format the `incident` record as a headline and indented lines of label and value."""
    room = None if width is None else max(30, width - _VALUES)
    lines = [_headline(record, colour, width)]
    for label, value in _rows(record, room):
        lines += _labelled(label, inline(value), room)
    return "\n".join(lines)


def _labelled(label: str, value: str, room: int | None) -> Iterator[str]:
    """Yield the value beside its label, or below it if one of its words does not fit."""
    head, indent = f"{_INDENT}{label}", _VALUES
    if room is None or len(value) <= room:
        texts = [value]
    elif longest_word(value) <= room:
        texts = wrapped(value, room)
    else:
        yield head
        head, indent = "", _BELOW
        texts = wrapped(value, room + _VALUES - _BELOW)
    for text in texts:
        yield f"{head:<{indent}}{text}".rstrip()
        head = ""


def _headline(record: dict[str, Any], colour: bool, width: int | None) -> str:
    ended = inline(record["outcome"])
    how = how_it_ended(record, ended)
    number, cause = f"incident {record['incident']}", inline(record["root_cause"]["summary"])
    line = f"{clock(record['opened_at'])}  {number}: {cause};"
    fits = width is None or len(line) + 1 + len(how) <= width
    line = folded(line, width, indent=len(_INDENT))
    if colour:
        line = line.replace(number, f"{_BOLD}{number}{_PLAIN}", 1)
        how = f"{_COLOURS.get(ended, '')}{how}{_PLAIN}"
    return f"{line} {how}" if fits else f"{line}\n{_INDENT}{how}"


def how_it_ended(record: dict[str, Any], ended: str) -> str:
    if "slow" in record:
        after = f"after {record['closed_at'] - record['opened_at']:.1f} s"
        return f"{'recovered' if ended == 'recovered' else ended} {after}"
    total = f"{record['total_s']:.3f} s"
    return f"recovered in {total}" if ended == "recovered" else f"{ended} after {total}"


def _rows(record: dict[str, Any], room: int | None) -> Iterator[tuple[str, str]]:
    yield from _seen(record)
    yield from _phases(record, room)
    yield from _outcome(record)
    label = "last words"
    for line in record["root_cause"]["log_tail"]:
        for text in [line] if room is None else wrapped(inline(line), room - 2) or [""]:
            yield label, f"| {text}"
            label = ""


def facts(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield label and value of all but phases and last words; an empty label repeats the last."""
    yield from _seen(record)
    yield from _outcome(record)


def _seen(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    began = record["opened_at"]
    first, witnesses = record["first_seen"], record["witnesses"]
    if first is not None:
        yield "first seen", f"{_witness(first)}, {clock(first['time'])}"
    for number, seen in enumerate(witnesses[1 : _MOST_LISTED + 1]):
        yield (
            ("witnesses" if number == 0 else ""),
            f"{_after(seen['time'] - began)} {_witness(seen)}",
        )
    if len(witnesses) > _MOST_LISTED + 1:
        yield "", f"and {len(witnesses) - _MOST_LISTED - 1} more"
    for number, other in enumerate(record["also_lost"]):
        why = "because of that" if other["consequence"] else "a failure of its own"
        label = "also" if number == 0 else ""
        yield label, f"{_after(other['time'] - began)} {inline(other['summary'])} ({why})"
    if "slow" in record:
        yield from _slow(record)


def _outcome(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if cost := _cost(record):
        yield "cost", cost
    if record["to_generation"]:
        yield "generation", _generations(record)
    if record["outcome"] == "recovered":
        yield "can lose", f"{count(record['can_lose'], 'more node')}, whichever"


def _slow(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each slow worker with its pace and duration, and the newest plans in answer."""
    began, slow, answers = record["opened_at"], record["slow"], record["attempts"]
    for number, one in enumerate(slow[:_MOST_LISTED]):
        per_step = f"{one['step_s']:.3f} s a step instead of {one['usual_s']:.3f} s"
        told = f"{one['worker']} at {one['rate']:.2f} of the others' pace, {per_step}"
        told += f", for {one['until'] - one['since']:.1f} s" + ", then normal" * one["well"]
        yield ("slow" if number == 0 else ""), f"{_after(one['since'] - began)} {told}"
    if len(slow) > _MOST_LISTED:
        yield "", f"and {len(slow) - _MOST_LISTED} more"
    if not answers:
        yield "answered", "with no plan"
    for number, answer in enumerate(answers[-_MOST_LISTED:]):
        told = f"generation {answer['generation']}, {answer['policy']}: {answer['reason']}"
        yield ("answered" if number == 0 else ""), told
    if len(answers) > _MOST_LISTED:
        yield "", f"and {len(answers) - _MOST_LISTED} before"


def _witness(seen: dict[str, Any]) -> str:
    who = {
        "agent": f"agent of {seen['observer']}",
        "peer": f"peer {seen['observer']}",
        "worker": f"worker {seen['observer']} itself",
        "stream": "master",
        "lease": "master, by the lease",
        "progress": "master, by lack of progress",
    }.get(seen["by"], f"{seen['by']} {seen['observer']}")
    about = f"{seen['about']}: " if seen["by"] == "stream" else ""
    return f"{who}: {about}{_one_line(seen['saw'])}"


def _one_line(text: str) -> str:
    first, _, rest = text.partition("\n")
    return inline(f"{first} ..." if rest else first)


def _after(span_s: float) -> str:
    return f"+{max(0.0, span_s):.3f} s"


def _phases(record: dict[str, Any], room: int | None) -> Iterator[tuple[str, str]]:
    """Yield a line of phase names over lines of seconds: each generation's, then the sums.

    A single generation has only the sums.
    """
    phases: dict[str, float] = {
        name: s for name, s in record["phases"].items() if s or name not in _RARE
    }
    attempts = [a for a in record["attempts"] if a["phases"] is not None]
    if not attempts:
        return
    spans = [(" all", [*phases.values(), sum(phases.values())])]
    if len(attempts) > 1:
        spans[:0] = [
            (
                f" generation {attempt['generation']}"[:_LABEL],
                [*(attempt["phases"].get(name, 0.0) for name in phases), attempt["total_s"]],
            )
            for attempt in attempts
        ]
    rows = [("seconds in", [*phases, "total"])]
    rows += [(label, [f"{span_s:.3f}" for span_s in of_label]) for label, of_label in spans]
    widths = [max(8, *map(len, column)) for column in zip(*(row for _, row in rows), strict=True)]
    most = sum(widths) + 2 * len(widths) if room is None else room
    for columns in grouped(widths, most, most):
        for label, row in rows:
            yield label, "  ".join(row[index].rjust(widths[index]) for index in columns)


def _cost(record: dict[str, Any]) -> str:
    parts = []
    if "slow" in record and record["total_s"]:
        parts.append(f"training stood still for {record['total_s']:.3f} s")
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

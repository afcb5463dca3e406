"""Incident as its parts: duration of each phase, and expectations of the plans in answer.

Pure: records of events.jsonl in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    name: str
    seconds: float
    #: Share of the whole bar, and where it begins, 0 to 1.
    share: float
    begin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Phases of one generation in answer, or of all of them."""

    name: str
    total_s: float
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Expected value beside the measured one."""

    what: str
    expected: str
    measured: str


def bars(record: Mapping[str, Any]) -> tuple[Bar, ...]:
    """Return a bar for the whole incident, then one for each generation if there are several."""
    answers = [one for one in record["attempts"] if one.get("phases")]
    found = [_bar("in all", record["phases"], float(record["total_s"]))]
    if len(answers) > 1:
        found += [
            _bar(f"generation {one['generation']}", one["phases"], float(one["total_s"]))
            for one in answers
        ]
    return tuple(bar for bar in found if bar.phases)


def _bar(name: str, phases: Mapping[str, float], total_s: float) -> Bar:
    whole = max(total_s, sum(phases.values()))
    found, begin = [], 0.0
    for phase, took_s in phases.items():
        if took_s > 0:
            share = took_s / whole
            found.append(Phase(name=phase, seconds=took_s, share=share, begin=begin))
            begin += share
    return Bar(name=name, total_s=total_s, phases=tuple(found))


def held(changes: Sequence[Mapping[str, Any]], step_s: Mapping[int, float]) -> tuple[Held, ...]:
    """Return expected and measured values.

    `changes`: the incident's `reconfigured` records. `step_s`: median time of steps, by generation.
    Values without an expectation are only measured.
    """
    found = []
    for change in changes:
        generation = int(change["to_generation"])
        expected: Mapping[str, Any] = change.get("expected") or {}
        name = f"generation {generation}"
        took = step_s.get(generation)
        found.append(_held(f"{name}: a step", expected.get("step_s"), took))
        found.append(_held(f"{name}: standstill", expected.get("stall_s"), change.get("stall_s")))
    return tuple(found)


def _held(what: str, expected_s: float | None, measured_s: float | None) -> Held:
    told = "unknown" if expected_s is None else f"{expected_s:.3f} s"
    return Held(
        what=what,
        expected=told,
        measured="unknown" if measured_s is None else f"{measured_s:.3f} s",
    )


def of_incident(
    record: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the `reconfigured` records that answered the incident."""
    answered = {attempt["generation"] for attempt in record["attempts"]}
    return [change for change in changes if change["to_generation"] in answered]

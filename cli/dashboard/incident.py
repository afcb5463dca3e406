"""Page *Incident*: its cause and witnesses, its time by phase, and the expected time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oobleck.cli.dashboard.pages import JobBased
from oobleck.cli.dashboard.parts import Part, Problem
from oobleck.cli.dashboard.sessions import Session
from oobleck.cli.dashboard.web import Site
from oobleck.cli.output.events import facts, how_it_ended, sentence
from oobleck.cli.view.state import open_incident
from oobleck.core.units import count


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


# ---- page


class IncidentPage(JobBased):
    template = "incident.html"
    active = "job"

    def __init__(self, site: Site, session: Session, job_id: str, number: str) -> None:
        super().__init__(site, session, job_id)
        # An event may arrive before the status that counts it.
        most = max(self.status().incidents, *self.feed.history(0.0).incidents, 0)
        if not number.isdecimal() or len(number) > 9 or not 1 <= int(number) <= most:
            told = f"{job_id} has had {count(most, 'incident')}; {number[:20]} is not one of them"
            raise Problem(404, told, "No such incident")
        self.number = int(number)
        self.title = f"Incident {self.number} of {job_id}"
        self.key = (type(self).__name__, self.role, job_id, self.number)

    def is_ready(self) -> bool:
        return self._record() is not None or self._is_open() or self.feed.is_complete

    def parts(self) -> Sequence[Part]:
        record = self._record()
        history = self.feed.history(0.0)
        if record is None:
            return [
                self.part(
                    "incident",
                    number=self.number,
                    record=None,
                    told=open_incident(self.status()) if self._is_open() else "",
                    later=[sentence(dict(event)) for event in history.events[-10:]],
                )
            ]
        changes = of_incident(record, history.changes)
        return [
            self.part(
                "incident",
                number=self.number,
                record=record,
                how=how_it_ended(dict(record), record["outcome"]),
                bars=bars(record),
                facts=list(facts(dict(record))),
                held=held(changes, history.step_s),
                profile=self.status().profile or "open",
                changes=[sentence(dict(change)) for change in changes],
            )
        ]

    def _record(self) -> Mapping[str, Any] | None:
        """Return the incident's record; None if it is open, or too old to be kept here."""
        return self.feed.history(0.0).incidents.get(self.number)

    def _is_open(self) -> bool:
        status = self.status()
        return self.number == status.incidents and open_incident(status) != ""

"""Page *Incident*: its cause and witnesses, its time by phase, and the expected time."""

from collections.abc import Mapping, Sequence
from typing import Any

from oobleck.cli.dashboard.pages.job import JobBased
from oobleck.cli.dashboard.parts import Part
from oobleck.cli.dashboard.problem import Problem
from oobleck.cli.dashboard.security.sessions import Session
from oobleck.cli.dashboard.site import Site
from oobleck.cli.output.events import sentence
from oobleck.cli.output.incident import facts, how_it_ended
from oobleck.cli.view import incident
from oobleck.cli.view.job import open_incident
from oobleck.core.units import count


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
        changes = incident.of_incident(record, history.changes)
        return [
            self.part(
                "incident",
                number=self.number,
                record=record,
                how=how_it_ended(dict(record), record["outcome"]),
                bars=incident.bars(record),
                facts=list(facts(dict(record))),
                held=incident.held(changes, history.step_s),
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

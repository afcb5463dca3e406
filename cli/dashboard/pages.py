"""Pages that stay up to date: Cluster, Job, Incident and Logs. Each lists its current parts."""

import time
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oobleck.cli.dashboard.chart import Mark, chart
from oobleck.cli.dashboard.parts import Part
from oobleck.cli.dashboard.sessions import Session
from oobleck.cli.dashboard.web import Site
from oobleck.cli.output import text
from oobleck.cli.output.events import clock, cluster_sentence, facts, how_it_ended, sentence
from oobleck.cli.output.table import tone
from oobleck.cli.view.feeds import JobFeed, JobHistory, Line, LogFeed
from oobleck.cli.view.series import Point
from oobleck.cli.view.state import (
    NodeRow,
    cluster,
    has_prospect,
    job_row,
    loss,
    open_incident,
    open_incidents,
    plan_map,
)
from oobleck.core.units import count
from oobleck.proto import control_pb2 as pb


class ClusterBased:
    """Page that depends at least on the cluster's state."""

    template = ""
    title = ""
    active = ""

    def __init__(self, site: Site, session: Session) -> None:
        self.site = site
        self.role = session.role
        self.key: Hashable = (type(self).__name__, self.role)

    def touch(self) -> None:
        self.site.hub.cluster.touch()

    def version(self) -> Hashable:
        return self.site.hub.cluster.version

    def is_ready(self) -> bool:
        return True

    def part(self, id: str, **values: object) -> Part:
        return self.site.templates.part(id, f"parts/{id}.html", **values)


# ---- page Cluster: open incidents, jobs, nodes, rates, and what has happened


_MOST_JOBS = 50
_MOST_CLUSTER_EVENTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    node: NodeRow
    may_drain: bool


class ClusterPage(ClusterBased):
    title = "Cluster"
    template = "cluster.html"
    active = "cluster"

    def touch(self) -> None:
        super().touch()
        _ = self.site.hub.events()

    def version(self) -> Hashable:
        return super().version(), self.site.hub.events().version

    def is_ready(self) -> bool:
        return self.site.hub.events().is_ready

    def parts(self) -> Sequence[Part]:
        snapshot = self.site.snapshot()
        found = cluster(snapshot.nodes, snapshot.jobs)
        may_drain = self.role == "operator"
        happened = [
            event.record
            for event in self.site.hub.events().events()
            if self.role == "operator" or not event.for_operators
        ]
        ended = [job for job in found.jobs if job.progress.over]
        return [
            self.part("summary", found=found, tone=tone),
            self.part("open", incidents=open_incidents(snapshot.jobs)),
            self.part(
                "jobs",
                jobs=[job for job in found.jobs if not job.progress.over],
                losses=found.losses,
            ),
            self.part("ended", jobs=ended[:_MOST_JOBS], number=len(ended)),
            self.part(
                "events",
                heading="What happened",
                events=[
                    {"at": text.moment(event["time"]), "sentence": cluster_sentence(dict(event))}
                    for event in reversed(happened[-_MOST_CLUSTER_EVENTS:])
                ],
            ),
            self.site.templates.rows(
                "nodes",
                "parts/nodes.html",
                "parts/node.html",
                {f"node-{row.name}": _Row(node=row, may_drain=may_drain) for row in found.nodes},
                some=bool(found.nodes),
                may_drain=may_drain,
            ),
        ]


# ---- page Job: its progress, loss and speed, its nodes, and its events


_MOST_EVENTS = 30
_MOST_INCIDENTS = 20
#: Facts that the page shows elsewhere.
_SHOWN = ("job", "state", "step", "loss", "speed", "incident", "can lose")
#: Events that an incident tells.
_OF_INCIDENT = (
    "node_lost",
    "worker_lost",
    "worker_late",
    "node_reset",
    "rate_changed",
    "reconfigured",
)


class JobBased(ClusterBased):
    """Page of one job. Raises Problem if the job does not exist."""

    def __init__(self, site: Site, session: Session, job_id: str) -> None:
        super().__init__(site, session)
        self.job_id = job_id
        self.title = job_id
        self.key = (type(self).__name__, self.role, job_id)
        self.status()

    def status(self) -> pb.JobStatus:
        """Return the job's status. Raise Problem."""
        snapshot = self.site.snapshot()
        found = snapshot.job(self.job_id)
        if found is None:
            names = ", ".join(job.job_id for job in snapshot.jobs[-5:]) or "none yet"
            problem = f"no such job: {self.job_id[:100]}; there are {names}"
            raise self.site.missing(problem, "No such job")
        return found

    @property
    def feed(self) -> JobFeed:
        """Feed of the job's steps and events. Raises Problem."""
        return self.site.hub.job(self.status())

    def touch(self) -> None:
        super().touch()
        _ = self.feed

    def version(self) -> Hashable:
        return super().version(), self.feed.version

    def is_ready(self) -> bool:
        return self.feed.has_caught_up(self.status().recorded_step)


class JobPage(JobBased):
    template = "job.html"
    active = "job"

    def __init__(self, site: Site, session: Session, job_id: str, span: str) -> None:
        super().__init__(site, session, job_id)
        self.span = "recent" if span == "recent" else "whole"
        self.key = (type(self).__name__, self.role, job_id, self.span)

    def parts(self) -> Sequence[Part]:
        job = self.status()
        history = self.feed.history(job.finished_at or time.time())
        job = _up_to_date(job, history)
        nodes = self.site.snapshot().nodes
        goes_on = has_prospect(job)
        first = history.points[0].first if history.points else 1
        return [
            self.part(
                "state",
                row=job_row(job),
                number=job.incidents,
                can_lose=count(job.can_lose, "more node") if goes_on else "",
                loss_tone=loss(job).tone if goes_on else "",
                goodput=history.goodput,
                since=f"step {first}" if history.points else "",
            ),
            self._charts(job, history),
            self.part("map", **plan_map(job.plan, nodes)),
            self.part(
                "incidents",
                job_id=self.job_id,
                is_open=open_incident(job) != "",
                incidents=sorted(history.incidents.values(), key=_number, reverse=True)[
                    :_MOST_INCIDENTS
                ],
            ),
            self.part(
                "facts",
                facts=[fact for fact in text.job_facts(job) if fact[0] not in _SHOWN],
                memory=job.memory,
            ),
            self.part(
                "events",
                heading="Other events",
                events=[
                    {"at": clock(event["time"]), "sentence": sentence(dict(event))}
                    for event in _worth_telling(job, history)[:_MOST_EVENTS]
                ],
            ),
        ]

    def _charts(self, job: pb.JobStatus, history: JobHistory) -> Part:
        points = history.recent if self.span == "recent" else history.points
        marks, step = list(_marks(self.job_id, job, history)), job.committed_step
        known = points[-1].last if points else step
        return self.part(
            "charts",
            loss=chart(points, lambda point: point.loss, marks, through=step, banded=True),
            speed=chart(points, lambda p: p.tokens_per_s, marks, through=step, from_zero=True),
            step=step,
            now_loss=job_row(job).progress.loss,
            now_speed=f"{job.tokens_per_s:,.0f}" if job.tokens_per_s else "",
            missing=(known + 1, step) if known < step else None,
        )


def _up_to_date(job: pb.JobStatus, history: JobHistory) -> pb.JobStatus:
    """Return the status with the newest step and incident of the streams, which are often newer, so
    that all parts of a page agree."""
    found = pb.JobStatus()
    found.CopyFrom(job)
    newest = history.recent[-1] if history.recent else None
    if newest is not None and newest.last > job.committed_step:
        found.committed_step = newest.last
        if newest.loss is not None:
            found.loss = newest.loss
    if (record := history.incidents.get(job.incidents)) is not None:
        found.last_incident = record["summary"]
        found.last_incident_at = float(record["closed_at"])
        del found.slow_workers[:]
    return found


def _worth_telling(job: pb.JobStatus, history: JobHistory) -> list[Mapping[str, Any]]:
    """Return the events to list, newest first. Of the many about checkpoints, keep only the newest
    and the newest failure. Leave out those of closed incidents, and slow workers of an open one,
    which the page shows elsewhere."""
    named = {(worker.node, worker.slot) for worker in job.slow_workers}
    newest = {event["event"]: event for event in history.events}
    spans = [(one["opened_at"], one["closed_at"]) for one in history.incidents.values()]

    def is_shown(event: Mapping[str, Any]) -> bool:
        match event["event"]:
            case "checkpoint_saved" | "checkpoint_failed" as kind:
                return event is newest[kind]
            case "incident":
                return False
            case "rate_changed" if (event["node"], event["slot"]) in named:
                return False
            case kind:
                within = any(begin <= event["time"] <= end for begin, end in spans)
                return not (within and kind in _OF_INCIDENT)

    return [event for event in reversed(history.events) if is_shown(event)]


def _number(record: Mapping[str, Any]) -> int:
    return int(record["incident"])


def _marks(job_id: str, job: pb.JobStatus, history: JobHistory) -> Iterator[Mark]:
    """Yield a mark for each incident, at the step before it."""
    for number, record in sorted(history.incidents.items()):
        yield Mark(
            step=_step_at(history.points, float(record["opened_at"])),
            title=f"incident {number}: {record['summary']}",
            href=f"jobs/{job_id}/incidents/{number}",
            tone="warn" if record["outcome"] in ("recovered", "succeeded") else "bad",
        )
    if summary := open_incident(job):
        yield Mark(
            step=job.committed_step,
            title=f"incident {job.incidents}, not over: {summary}",
            href=f"jobs/{job_id}/incidents/{job.incidents}",
            tone="bad",
        )


def _step_at(points: Sequence[Point], at: float) -> int:
    """Return the last step that was committed before a Unix time."""
    before = bisect_right(points, at, key=lambda point: point.time)
    return points[before - 1].last if before else 0


# ---- page Incident: its cause and witnesses, its time by phase, and the expected time


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
    expected = "unknown" if expected_s is None else f"{expected_s:.3f} s"
    return Held(
        what=what,
        expected=expected,
        measured="unknown" if measured_s is None else f"{measured_s:.3f} s",
    )


def of_incident(
    record: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the `reconfigured` records that answered the incident."""
    answered = {attempt["generation"] for attempt in record["attempts"]}
    return [change for change in changes if change["to_generation"] in answered]


class IncidentPage(JobBased):
    template = "incident.html"
    active = "job"

    def __init__(self, site: Site, session: Session, job_id: str, number: str) -> None:
        super().__init__(site, session, job_id)
        # An event may arrive before the status that counts it.
        most = max(self.status().incidents, *self.feed.history(0.0).incidents, 0)
        if not number.isdecimal() or len(number) > 9 or not 1 <= int(number) <= most:
            problem = (
                f"{job_id} has had {count(most, 'incident')}; {number[:20]} is not one of them"
            )
            raise self.site.missing(problem, "No such incident")
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
                    summary=open_incident(self.status()) if self._is_open() else "",
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


# ---- page Logs: live output of a job's workers, filtered by node and text


MOST_SHOWN = 400
_MOST_CHARACTERS = 200


class LogsPage(JobBased):
    template = "logs.html"
    active = "logs"

    def __init__(self, site: Site, session: Session, job_id: str, node: str, having: str) -> None:
        """Make the page. `having`: text that a shown line contains, ignoring case."""
        super().__init__(site, session, job_id)
        self.title = f"Logs of {job_id}"
        self.node = node[:_MOST_CHARACTERS]
        self.having = having[:_MOST_CHARACTERS]
        self.key = (type(self).__name__, self.role, job_id, self.node, self.having)

    @property
    def logs(self) -> LogFeed:
        """Feed of the job's output. Raises Problem."""
        return self.site.hub.logs(self.status())

    @property
    def nodes(self) -> list[str]:
        """Nodes with a log line here, and the chosen one."""
        found = {line.node for line in self.logs.lines()} | ({self.node} - {""})
        return sorted(found)

    def touch(self) -> None:
        self.site.hub.cluster.touch()
        _ = self.logs

    def version(self) -> Hashable:
        return self.site.hub.cluster.trouble, self.logs.version, self.logs.following.trouble

    def is_ready(self) -> bool:
        return self.logs.version > 0 or self.logs.is_complete

    def parts(self) -> Sequence[Part]:
        lines = [line for line in self.logs.lines() if self._is_wanted(line)][-MOST_SHOWN:]
        return [
            self.site.templates.rows(
                "lines",
                "parts/lines.html",
                "parts/line.html",
                {f"line-{line.number}": line for line in lines},
                some=bool(lines),
                trouble=self.logs.following.trouble,
            )
        ]

    def _is_wanted(self, line: Line) -> bool:
        if self.node and line.node != self.node:
            return False
        return self.having.lower() in line.text.lower()

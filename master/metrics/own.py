"""Metrics of the master itself: its loop, its journal, its planner, its service. Must not know what
the state holds."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from oobleck.host.metrics import Family, Reading, single
from oobleck.host.versions import installed
from oobleck.master.api.connections import Connections
from oobleck.master.api.interceptor import Calls
from oobleck.master.loop import Master
from oobleck.master.metrics.tally import Tally
from oobleck.master.planning.process import PlanningProcess
from oobleck.master.storage.journal import Journal

BUILD = Family("gauge", "oobleck_build_info", "1; the version.", ("version",))

ITERATION = Family(
    "histogram", "oobleck_master_iteration_seconds", "Time of an iteration of the master's loop."
)
LATE = Family(
    "counter",
    "oobleck_master_late_seconds_total",
    "Time by which the master looked too late, for which nobody is blamed.",
)
LATE_TIMES = Family(
    "counter", "oobleck_master_late_iterations_total", "Times that the master looked too late."
)
WAITING = Family(
    "gauge", "oobleck_master_waiting_messages", "Messages and questions ahead of the loop."
)
SESSIONS = Family("gauge", "oobleck_master_agent_sessions", "Open sessions of agents.")
OPENED = Family(
    "counter", "oobleck_master_agent_sessions_opened_total", "Opened sessions of agents."
)
RECEIVED = Family(
    "counter",
    "oobleck_master_agent_messages_total",
    "Accepted messages of agents, by kind.",
    ("kind",),
)
REFUSED = Family(
    "counter",
    "oobleck_refused_total",
    "Refused messages and calls, by reason.",
    ("reason",),
)

EVENTS = Family("counter", "oobleck_events_total", "Journaled events, by name.", ("event",))
SEQUENCE = Family("counter", "oobleck_journal_events_total", "Number of the journal's last event.")
JOURNAL = Family("gauge", "oobleck_journal_bytes", "Size of the journal.")
COMMIT = Family("histogram", "oobleck_journal_commit_seconds", "Time to have events on the disk.")
COMPACTIONS = Family(
    "counter", "oobleck_journal_compactions_total", "Snapshots that replaced events."
)
FAILING = Family(
    "gauge", "oobleck_storage_failing", "1 while the state directory cannot be written."
)
DISK_FREE = Family(
    "gauge", "oobleck_storage_free_bytes", "Room left on the state directory's disk."
)
DISK_SIZE = Family("gauge", "oobleck_storage_size_bytes", "Size of the state directory's disk.")

PLANNING = Family(
    "histogram",
    "oobleck_planner_reply_seconds",
    "Time to plan, for a decision or ahead.",
    ("purpose",),
)
AT_WORK = Family("gauge", "oobleck_planner_busy", "1 while the planning process plans.")
ENDS = Family(
    "counter", "oobleck_planner_failures_total", "Ends and hangs of the planning process."
)

CALLS = Family(
    "counter",
    "oobleck_grpc_calls_total",
    "Ended calls, by method and status.",
    ("method", "code"),
)
OPEN_CALLS = Family("gauge", "oobleck_grpc_open_calls", "Open calls and streams.", ("method",))
ANSWER = Family(
    "histogram", "oobleck_grpc_call_seconds", "Time of calls without streams.", ("method",)
)
PROVEN = Family("gauge", "oobleck_grpc_connections", "Connections with an allowed call.")
SHUT_OUT = Family(
    "gauge",
    "oobleck_grpc_refused_sources",
    "Addresses refused since their connections made no call.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Components of the master's process that its own metrics are read from."""

    master: Master
    planner: PlanningProcess
    calls: Calls
    connections: Connections
    journal: Journal
    #: Version of Oobleck.
    version: str = field(default_factory=lambda: installed().oobleck)


def read(parts: Parts, tally: Tally) -> Iterator[Reading]:
    yield Reading(BUILD, {(parts.version,): 1})
    yield from _loop(parts.master)
    yield from _storage(parts.master, parts.journal, tally)
    planner = parts.planner
    took = {("wanted",): planner.took.read(), ("ahead",): planner.took_ahead.read()}
    yield Reading(PLANNING, took)
    yield single(AT_WORK, planner.is_busy)
    yield single(ENDS, planner.failures)
    yield Reading(CALLS, dict(parts.calls.ended))
    yield Reading(OPEN_CALLS, {(name,): n for name, n in parts.calls.open.items()})
    yield Reading(ANSWER, {(name,): d.read() for name, d in parts.calls.took.items()})
    yield single(PROVEN, parts.connections.proven)
    yield single(SHUT_OUT, len(parts.connections.refused))


def _loop(master: Master) -> Iterator[Reading]:
    yield single(ITERATION, master.vitals.iterations.read())
    yield single(LATE, master.vitals.late_s)
    yield single(LATE_TIMES, master.vitals.late_times)
    yield single(WAITING, master.waiting)
    sessions = master.sessions
    yield single(SESSIONS, sessions.count)
    yield single(OPENED, sessions.opened)
    yield Reading(RECEIVED, {(kind,): count for kind, count in sessions.received.items()})
    yield Reading(REFUSED, {(reason,): count for reason, count in sessions.refused.items()})


def _storage(master: Master, journal: Journal, tally: Tally) -> Iterator[Reading]:
    yield Reading(EVENTS, {(name,): count for name, count in tally.events.items()})
    yield single(SEQUENCE, master.state.sequence)
    yield single(JOURNAL, journal.size_bytes)
    yield single(COMMIT, master.commits)
    yield single(COMPACTIONS, journal.compactions)
    yield single(FAILING, master.problem != "")
    yield from _disk(master.config.state_dir)


def _disk(directory: Path) -> Iterator[Reading]:
    """Yield free and total bytes of the disk; nothing if it cannot be read, which the master
    reports as a problem."""
    try:
        disk = os.statvfs(directory)
    except OSError:
        return
    yield single(DISK_FREE, disk.f_bavail * disk.f_frsize)
    yield single(DISK_SIZE, disk.f_blocks * disk.f_frsize)

"""Feeds of a cluster, a job and its output for pages, read by threads and kept in bounded memory.

`oobleck top` and `oobleck dashboard` share them. While the master is away, all keep trying, also
with renewed credentials; after its return nothing is missing or repeated.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.jobs.follow import LogPosition
from oobleck.cli.view.series import Point, Series
from oobleck.host.command import NO_SUCH_THING, CommandFailed
from oobleck.proto import control_pb2 as pb

# ---- one stream


#: Connects with the current credentials. Raises CommandFailed or ValueError.
Connect = Callable[[], MasterClient]

#: Pauses between two attempts while the master is away, and while it refuses.
_AGAIN_S = 0.5
_REFUSED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Reason why nothing arrives from the master."""

    line: str
    #: Unix time.
    since: float
    #: Whether the master is unreachable; otherwise it refuses.
    away: bool


class Following:
    def __init__(self, connect: Connect, read: Callable[[MasterClient], None], name: str) -> None:
        """Prepare the thread.

        `read`: reads the stream to its end and calls `heard` meanwhile; called again, it continues
        where it was.
        """
        self._connect = connect
        self._read = read
        self._closed = threading.Event()
        self._client: MasterClient | None = None
        self._lock = threading.Lock()
        #: Current trouble; None: none.
        self.trouble: Trouble | None = None
        #: Whether the stream has ended, or never existed.
        self.ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def heard(self) -> None:
        """Note that something has arrived, which ends any trouble."""
        self.trouble = None

    def close(self) -> None:
        """Drop the connection; the thread ends soon."""
        self._closed.set()
        self._drop()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                client = self._open()
                if client is None:
                    return
                self._read(client)
                self.heard()
                self.ended = True
                self._drop()
                return
            except Unreachable as unreachable:
                self._fail(unreachable, away=True)
                self._closed.wait(_AGAIN_S)
            except (CommandFailed, ValueError) as failure:
                self._fail(failure, away=False)
                self._drop()  # credentials may be renewed meanwhile
                if isinstance(failure, CommandFailed) and failure.exit_code == NO_SUCH_THING:
                    self.ended = True
                    return
                self._closed.wait(_REFUSED_S)

    def _open(self) -> MasterClient | None:
        """Return the connection, opened if needed; None if this is closed."""
        with self._lock:
            if self._closed.is_set():
                return None
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _drop(self) -> None:
        """Close the connection, which ends its streams in any thread."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(ValueError):  # already closed
                client.close()

    def _fail(self, failure: Exception, *, away: bool) -> None:
        self.trouble = trouble(failure, self.trouble, away=away)


def sharing(connect: Connect, name: str) -> Connect:
    """Have all that `connect` makes share one connection with others of that name."""
    return lambda: connect().share(name)


def trouble(failure: Exception, before: Trouble | None, *, away: bool) -> Trouble:
    """Return the trouble after `failure`. `before`: the trouble so far."""
    since = before.since if before is not None else time.time()
    return Trouble(line=str(failure).partition(";")[0], since=since, away=away)


# ---- feeds


#: Interval of asking the master, while a browser looks; the pause is three times the answer's
#: duration or more.
EVERY_S = 1.0
_REST = 3.0
#: Time after the last look at which a feed pauses.
_IDLE_S = 5.0
#: Most steps of history; the curves of a longer job begin later.
MOST_HISTORY = 50_000
MOST_EVENTS = 500
MOST_INCIDENTS = 200
_MOST_CHANGES = 500
#: Most generations with a known pace, and most last steps of each.
_MOST_GENERATIONS = 100
_MOST_PACED = 50
#: Most lines of output, and characters of each; longer ones are cut.
MOST_LINES = 2000
MOST_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    #: Unix time of the question, and seconds until the answer.
    at: float
    took_s: float
    nodes: Sequence[pb.NodeInfo]
    jobs: Sequence[pb.JobStatus]
    #: Problem of the master itself; empty: none.
    problem: str

    def job(self, job_id: str) -> pb.JobStatus | None:
        return next((job for job in self.jobs if job.job_id == job_id), None)


class ClusterFeed:
    """Nodes and jobs, asked for repeatedly while the feed is `touch`ed."""

    def __init__(self, connect: Connect, *, every_s: float = EVERY_S) -> None:
        self._connect = connect
        self._every_s = every_s
        self.snapshot: Snapshot | None = None
        self.trouble: Trouble | None = None
        #: Number of calls of the master.
        self.version = 0
        self._touched = float("-inf")
        self._wanted = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, name="cluster", daemon=True).start()

    def touch(self) -> None:
        self._touched = time.monotonic()
        self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        client: MasterClient | None = None
        while True:
            self._wanted.wait()
            if self._closed:
                break
            if time.monotonic() - self._touched > _IDLE_S:
                self._wanted.clear()
                continue
            began = time.monotonic()
            try:
                client = client or self._connect()
                self.ask(client)
            except (CommandFailed, ValueError) as failure:
                away = isinstance(failure, Unreachable)
                self.trouble = trouble(failure, self.trouble, away=away)
                if client is not None and not away:  # reconnect with the then current credentials
                    client.close()
                    client = None
            self.version += 1
            took_s = time.monotonic() - began
            time.sleep(max(self._every_s - took_s, _REST * took_s, 0.0))
        if client is not None:
            client.close()

    def ask(self, client: MasterClient) -> None:
        """Ask for nodes and jobs now. Raise CommandFailed."""
        at = time.time()
        jobs, nodes = client.jobs(), client.nodes()
        self.snapshot = Snapshot(
            at=at, took_s=time.time() - at, nodes=nodes, jobs=jobs, problem=client.problem
        )
        self.trouble = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEvent:
    record: Mapping[str, Any]
    #: Whether viewers may not read it.
    for_operators: bool

    @classmethod
    def of(cls, message: pb.EventRecord) -> "ClusterEvent":
        return cls(record=json.loads(message.json), for_operators=message.for_operators)


class EventFeed:
    """Feed of the cluster's newest events."""

    def __init__(self, connect: Connect) -> None:
        self.touched = time.monotonic()
        self.version = 0
        self._lock = threading.Lock()
        self._events = deque[ClusterEvent](maxlen=MOST_EVENTS)
        self.following = Following(connect, self._read, "events of the cluster")
        self.following.start()

    def close(self) -> None:
        self.following.close()

    @property
    def is_ready(self) -> bool:
        """True once all past events have arrived, or none can."""
        return self.version > 0 or self.following.ended or self.following.trouble is not None

    def events(self) -> Sequence[ClusterEvent]:
        """Return the events, newest last."""
        with self._lock:
            return tuple(self._events)

    def _read(self, client: MasterClient) -> None:
        # Replace known events by the past ones: a restored master may have fewer.
        past = [ClusterEvent.of(message) for message in client.events("", follow=False)]
        last = past[-1].record["id"] if past else 0
        self.following.heard()
        with self._lock:
            self._events = deque(past, MOST_EVENTS)
            self.version += 1
        for message in client.events("", follow=True):
            self.following.heard()
            event = ClusterEvent.of(message)
            if event.record["id"] > last:
                with self._lock:
                    self._events.append(event)
                    self.version += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHistory:
    """History of a job: all that is known beside its status."""

    points: Sequence[Point] = ()
    recent: Sequence[Point] = ()
    goodput: float | None = None
    #: Newest last.
    events: Sequence[Mapping[str, Any]] = ()
    #: Closed incidents by number.
    incidents: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    #: `reconfigured` records.
    changes: Sequence[Mapping[str, Any]] = ()
    #: Median time of the last steps, by generation.
    step_s: Mapping[int, float] = field(default_factory=dict)


class JobFeed:
    """Feed of a job's steps and events."""

    def __init__(
        self, connect: Connect, job_id: str, recorded_step: int, *, steps: int = MOST_HISTORY
    ) -> None:
        """Start reading. `steps`: how many of those until `recorded_step` are read."""
        self.job_id = job_id
        self.touched = time.monotonic()
        #: Grows with every record.
        self.version = 0
        self._lock = threading.Lock()
        self._series = Series()
        self._from_step = max(1, recorded_step - steps + 1)
        self._events = deque[Mapping[str, Any]](maxlen=MOST_EVENTS)
        self._last_id = 0
        self._incidents: dict[int, Mapping[str, Any]] = {}
        self._changes = deque[Mapping[str, Any]](maxlen=_MOST_CHANGES)
        self._step_s: dict[int, deque[float]] = {}
        connect = sharing(connect, job_id)
        self.steps = Following(connect, self._read_steps, f"steps of {job_id}")
        self.happenings = Following(connect, self._read_events, f"events of {job_id}")
        self.steps.start()
        self.happenings.start()

    def close(self) -> None:
        self.steps.close()
        self.happenings.close()

    @property
    def is_complete(self) -> bool:
        return self.steps.ended and self.happenings.ended

    def has_caught_up(self, recorded_step: int) -> bool:
        """Return whether all that was known at the start has arrived."""
        return self._series.last_step >= recorded_step or self.steps.ended

    def history(self, now: float) -> JobHistory:
        with self._lock:
            return JobHistory(
                points=self._series.whole(),
                recent=self._series.recent(),
                goodput=self._series.goodput(now),
                events=tuple(self._events),
                incidents=dict(self._incidents),
                changes=tuple(self._changes),
                step_s={generation: median(taken) for generation, taken in self._step_s.items()},
            )

    def _read_steps(self, client: MasterClient) -> None:
        first = max(self._from_step, self._series.last_step + 1)
        for line in client.metrics(self.job_id, follow=True, from_step=first):
            self.steps.heard()
            record = json.loads(line)
            with self._lock:
                self._series.add(record)
                self._pace(record)
                self.version += 1

    def _pace(self, record: Mapping[str, Any]) -> None:
        generation = int(record.get("generation", 0))
        if generation not in self._step_s:
            if len(self._step_s) >= _MOST_GENERATIONS:
                del self._step_s[next(iter(self._step_s))]
            self._step_s[generation] = deque(maxlen=_MOST_PACED)
        self._step_s[generation].append(float(record.get("step_seconds", 0.0)))

    def _read_events(self, client: MasterClient) -> None:
        for message in client.events(self.job_id, follow=True):
            self.happenings.heard()
            record = json.loads(message.json)
            if record["id"] <= self._last_id:  # repeated after the master's restart
                continue
            with self._lock:
                self._last_id = record["id"]
                self._take(record)
                self.version += 1

    def _take(self, record: Mapping[str, Any]) -> None:
        self._events.append(record)
        match record["event"]:
            case "incident":
                if len(self._incidents) >= MOST_INCIDENTS:
                    del self._incidents[next(iter(self._incidents))]
                self._incidents[record["incident"]] = record
            case "reconfigured":
                self._changes.append(record)
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    number: int
    time: str
    worker: str
    node: str
    text: str


class LogFeed:
    """Feed of the last lines of a job's workers, and new ones."""

    def __init__(self, connect: Connect, job_id: str, since: str) -> None:
        """Start reading. `since`: time before the first line, in the master's format."""
        self.job_id = job_id
        self.touched = time.monotonic()
        self.version = 0
        self._lock = threading.Lock()
        self._position = LogPosition(time=since)
        self._lines = deque[Line](maxlen=MOST_LINES)
        connect = sharing(connect, job_id)
        self.following = Following(connect, self._read, f"output of {job_id}")
        self.following.start()

    def close(self) -> None:
        self.following.close()

    @property
    def is_complete(self) -> bool:
        return self.following.ended

    def lines(self) -> Sequence[Line]:
        with self._lock:
            return tuple(self._lines)

    def _read(self, client: MasterClient) -> None:
        since = self._position.again()
        for line in client.logs(self.job_id, follow=True, node=None, rank=None, since=since):
            self.following.heard()
            if not self._position.is_new(line):
                continue
            with self._lock:
                self.version += 1
                self._lines.append(
                    Line(
                        number=self.version,
                        time=line.time,
                        worker=f"{line.node}/{line.slot}",
                        node=line.node,
                        text=line.line[:MOST_CHARACTERS],
                    )
                )

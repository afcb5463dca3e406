"""Feed of `oobleck top`: answers of the master, read by threads and kept for the page.

One thread asks for nodes and jobs, three follow the shown job. The threads and the page do not wait
for each other. While the master is away, all keep trying; after its return nothing is missing or
repeated. The story of a job is bounded to a page's content, so memory stays bounded.
"""

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.follow import LogPosition
from oobleck.cli.output.events import event_line
from oobleck.cli.output.text import ENDED
from oobleck.cli.view.series import Point, Series
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

MOST_EVENTS = 500
MOST_INCIDENTS = 100
MOST_LINES = 1000
#: Longest line of output; longer ones are cut.
MOST_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Story at one moment; newest last."""

    #: All steps that were read, merged if they are many; and the newest.
    whole: Sequence[Point] = ()
    recent: Sequence[Point] = ()
    #: Goodput since the first of these steps; None: there is none.
    goodput: float | None = None
    #: One line each.
    events: Sequence[str] = ()
    #: Records of closed incidents.
    incidents: Sequence[dict[str, Any]] = ()
    logs: Sequence[pb.LogLine] = ()


@dataclass(slots=True)
class Story:
    steps: Series = field(default_factory=Series)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    incidents: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_INCIDENTS))
    logs: deque[pb.LogLine] = field(default_factory=lambda: deque(maxlen=MOST_LINES))

    def happened(self, record: dict[str, Any]) -> None:
        """Keep a record of events.jsonl."""
        self.events.append(event_line(record))
        if record["event"] == "incident":
            self.incidents.append(record)

    def printed(self, line: pb.LogLine) -> None:
        text = line.line[:MOST_CHARACTERS]
        self.logs.append(pb.LogLine(node=line.node, slot=line.slot, line=text, time=line.time))

    def told(self, until: float) -> Told:
        """Return the story now. `until`: Unix time up to which goodput counts."""
        return Told(
            whole=self.steps.whole(),
            recent=self.steps.recent(),
            goodput=self.steps.goodput(until),
            events=tuple(self.events),
            incidents=tuple(self.incidents),
            logs=tuple(self.logs),
        )


#: Interval of asking for nodes and jobs.
EVERY_S = 1.0
#: Pause between attempts to follow the job, while the master is away or refuses.
_AGAIN_S = 0.5
#: Part of the job's past that is shown: steps, and seconds of its output.
_STEPS = 2000
_OUTPUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a page shows."""

    nodes: Sequence[pb.NodeInfo] = ()
    jobs: Sequence[pb.JobStatus] = ()
    #: The shown job; None: there is none.
    job: pb.JobStatus | None = None
    told: Told = field(default_factory=Told)
    #: Problem of the master itself; empty: none.
    problem: str = ""
    #: Why it does not answer, and for how many seconds; None: it does.
    failure: CommandFailed | None = None
    failing_s: float = 0.0


class Feed:
    """Feed for the page; a context manager."""

    def __init__(
        self, endpoint: Endpoint, job_id: str | None = None, *, every_s: float = EVERY_S
    ) -> None:
        """Start. `job_id`: the job to show; None: the one that trains.

        Raise CommandFailed if no master answers, or if it does not know the job.
        """
        self._endpoint = endpoint
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        #: May also be used to change something.
        self.master = MasterClient(endpoint)
        self._wanted = job_id
        self._nodes: Sequence[pb.NodeInfo] = ()
        self._jobs: Sequence[pb.JobStatus] = ()
        self._problem = ""
        self._failure: CommandFailed | None = None
        self._failing_since = 0.0
        self._follower: _Follower | None = None
        try:
            if job_id is not None:
                self.master.job(job_id)
            self._ask()
        except CommandFailed:
            self.master.close()
            raise
        self._choose()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.master.close()
        self._thread.join()
        if self._follower is not None:
            self._follower.close()

    def look(self) -> View:
        with self._lock:
            follower = self._follower
            job = None if follower is None else _named(self._jobs, follower.job_id)
            return View(
                nodes=self._nodes,
                jobs=self._jobs,
                job=job,
                told=Told() if follower is None or job is None else follower.told(job),
                problem=self._problem,
                failure=self._failure,
                failing_s=time.monotonic() - self._failing_since,
            )

    def turn(self, by: int) -> None:
        """Show the job submitted `by` jobs after the shown one; negative: before it.

        The first and the last have no neighbour there.
        """
        with self._lock:
            names = [job.job_id for job in self._jobs]
            if self._follower is None or self._follower.job_id not in names:
                return
            at = names.index(self._follower.job_id) + by
            self._wanted = names[max(0, min(at, len(names) - 1))]
        self._choose()

    def _ask(self) -> None:
        """Ask for nodes and jobs. Raise CommandFailed."""
        nodes, jobs = self.master.nodes(), self.master.jobs()
        with self._lock:
            self._nodes, self._jobs = nodes, jobs
            self._problem, self._failure = self.master.problem, None

    def _poll(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._ask()
            except CommandFailed as failed:
                with self._lock:
                    if self._failure is None:
                        self._failing_since = time.monotonic()
                    self._failure = failed
            except ValueError:  # from gRPC: the channel was closed meanwhile
                if not self._stop.is_set():
                    raise
            else:
                self._choose()

    def _choose(self) -> None:
        """Follow the job that should be shown."""
        with self._lock:
            job, before = shown(self._jobs, self._wanted), self._follower
            if job is None or (before is not None and before.job_id == job.job_id):
                return
            self._follower = _Follower(self._endpoint, job)
        if before is not None:
            before.close()


class _Follower:
    """Follower of one job; its own connection ends all its streams."""

    def __init__(self, endpoint: Endpoint, job: pb.JobStatus) -> None:
        self.job_id = job.job_id
        self._master = MasterClient(endpoint)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._story = Story()
        #: Position in events, steps and output.
        self._event = 0
        self._step = max(0, job.committed_step - _STEPS)
        self._output = LogPosition(time=_stamp((job.finished_at or time.time()) - _OUTPUT_S))
        for stream in (self._events, self._steps, self._lines):
            threading.Thread(target=self._follow, args=(stream,), daemon=True).start()

    def told(self, job: pb.JobStatus) -> Told:
        with self._lock:
            return self._story.told(job.finished_at or time.time())

    def close(self) -> None:
        self._stop.set()
        self._master.close()

    def _follow(self, stream: Callable[[], Iterator[None]]) -> None:
        """Read the stream until the job ends.

        The thread that asks for nodes and jobs reports if the master is away or refuses.
        """
        while not self._stop.is_set():
            with contextlib.suppress(CommandFailed):
                try:
                    for _ in stream():
                        pass
                except ValueError:  # from gRPC: the channel was closed meanwhile
                    if not self._stop.is_set():
                        raise
                return
            self._stop.wait(_AGAIN_S)

    def _events(self) -> Iterator[None]:
        for line in self._master.events(self.job_id, follow=True):
            record: dict[str, Any] = json.loads(line.json)
            if (number := int(record["id"])) > self._event:
                self._event = number
                with self._lock:
                    self._story.happened(record)
            yield

    def _steps(self) -> Iterator[None]:
        for line in self._master.metrics(self.job_id, follow=True, from_step=self._step + 1):
            record: dict[str, Any] = json.loads(line)
            self._step = max(self._step, int(record["step"]))
            with self._lock:
                self._story.steps.add(record)
            yield

    def _lines(self) -> Iterator[None]:
        since, known = self._output.time, self._output.lines
        for line in self._master.logs(self.job_id, follow=True, node=None, rank=None, since=since):
            if line.time == since and known:
                known -= 1
            else:
                self._output.told(line)
                with self._lock:
                    self._story.printed(line)
            yield


def shown(jobs: Sequence[pb.JobStatus], wanted: str | None) -> pb.JobStatus | None:
    """Return the job to show; None: there is none.

    That is the wanted one, else one that trains, else the first queued one, else the newest.
    """
    if (found := _named(jobs, wanted)) is not None:
        return found
    going = [job for job in jobs if job.state not in ENDED]
    begun = [job for job in going if job.state != "queued"]
    return next(iter([*begun, *going, *reversed(jobs)]), None)


def _named(jobs: Sequence[pb.JobStatus], job_id: str | None) -> pb.JobStatus | None:
    return next((job for job in jobs if job.job_id == job_id), None)


def _stamp(unix: float) -> str:
    """Format a time as in the master's log lines."""
    return datetime.fromtimestamp(max(0.0, unix), UTC).isoformat(timespec="microseconds")

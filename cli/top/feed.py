"""Feed of `oobleck top`: what the master tells, read by threads and kept for the page to look at.

One thread asks for nodes and jobs, three follow the job that is shown. None of them waits for the
page, and the page waits for none of them. While the master is away all go on trying; when it is
back nothing is left out, and nothing told twice.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.away import LogPosition
from oobleck.cli.output.text import ENDED
from oobleck.cli.top.story import Story, Told
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

#: Between two looks at nodes and jobs.
EVERY_S = 1.0
#: Between two tries to follow the job, where the master is away or refuses.
_AGAIN_S = 0.5
#: Of the job's past: steps, and seconds of its output.
_STEPS = 2000
_OUTPUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """View of everything that a page shows."""

    nodes: Sequence[pb.NodeInfo] = ()
    jobs: Sequence[pb.JobStatus] = ()
    #: The one that is shown; None: there is none.
    job: pb.JobStatus | None = None
    told: Told = field(default_factory=Told)
    #: What ails the master itself; empty: nothing.
    problem: str = ""
    #: Why it gives no answer, and for how many seconds; None: it does.
    failure: CommandFailed | None = None
    failing_s: float = 0.0


class Feed:
    """Use it as a context."""

    def __init__(
        self, endpoint: Endpoint, job_id: str | None = None, *, every_s: float = EVERY_S
    ) -> None:
        """`job_id`: the job to show; None: whichever trains. Raises CommandFailed where no master
        answers, or where it knows no such job."""
        self._endpoint = endpoint
        self._every_s = every_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        #: Whoever changes something may use it too.
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
        """Show the job that was submitted so many after the one that is shown; before it, where
        `by` is negative. The first and the last have no neighbour there."""
        with self._lock:
            names = [job.job_id for job in self._jobs]
            if self._follower is None or self._follower.job_id not in names:
                return
            at = names.index(self._follower.job_id) + by
            self._wanted = names[max(0, min(at, len(names) - 1))]
        self._choose()

    def _ask(self) -> None:
        """Raises CommandFailed."""
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
        """Follow the job that is to be shown."""
        with self._lock:
            job, before = shown(self._jobs, self._wanted), self._follower
            if job is None or (before is not None and before.job_id == job.job_id):
                return
            self._follower = _Follower(self._endpoint, job)
        if before is not None:
            before.close()


class _Follower:
    """Follows one job by a connection of its own, whose end is the end of all its streams."""

    def __init__(self, endpoint: Endpoint, job: pb.JobStatus) -> None:
        self.job_id = job.job_id
        self._master = MasterClient(endpoint)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._story = Story()
        #: How far the story goes: events, steps, output.
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
        """Read the stream until the job ends. The thread that asks for nodes and jobs tells of a
        master that is away, or refuses."""
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
    """The job that a page shows: the one that is wanted, else the one that trains, else the first
    that waits, else the newest; None: there is none."""
    if (found := _named(jobs, wanted)) is not None:
        return found
    going = [job for job in jobs if job.state not in ENDED]
    begun = [job for job in going if job.state != "queued"]
    return next(iter([*begun, *going, *reversed(jobs)]), None)


def _named(jobs: Sequence[pb.JobStatus], job_id: str | None) -> pb.JobStatus | None:
    return next((job for job in jobs if job.job_id == job_id), None)


def _stamp(unix: float) -> str:
    """Format a time as the master writes it in front of a line."""
    return datetime.fromtimestamp(max(0.0, unix), UTC).isoformat(timespec="microseconds")

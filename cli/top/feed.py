"""Feed of `oobleck top`: the cluster and one of its jobs at one moment.

Threads read the master's answers (`oobleck.cli.view.feeds`), so the page never waits for them. This
module owns which job is shown.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.follow import log_time
from oobleck.cli.output.events import event_line
from oobleck.cli.output.text import ENDED
from oobleck.cli.view.feeds import (
    EVERY_S,
    ClusterFeed,
    Connect,
    JobFeed,
    JobHistory,
    Line,
    LogFeed,
    Trouble,
)
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

#: Part of a job's past that is read: steps, and seconds of its output.
_STEPS = 2000
_OUTPUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a page shows."""

    nodes: Sequence[pb.NodeInfo] = ()
    jobs: Sequence[pb.JobStatus] = ()
    #: The shown job; None: there is none.
    job: pb.JobStatus | None = None
    history: JobHistory = field(default_factory=JobHistory)
    #: Its events, one line each.
    events: Sequence[str] = ()
    lines: Sequence[Line] = ()
    #: Problem of the master itself; empty: none.
    problem: str = ""
    #: Why the master does not answer; None: it does.
    trouble: Trouble | None = None


class Feed:
    """Feed for the page; a context manager."""

    def __init__(
        self, endpoint: Endpoint, job_id: str | None = None, *, every_s: float = EVERY_S
    ) -> None:
        """Start. `job_id`: the job to show; None: the one that trains. Raise CommandFailed if no
        master answers, or if it does not know the job."""
        self._endpoint = endpoint
        self._wanted = job_id
        #: May also be used to change something.
        self.master = self._connect()
        self._cluster = ClusterFeed(self._connect, every_s=every_s)
        self._shown: _Shown | None = None
        try:
            if job_id is not None:
                self.master.job(job_id)
            self._cluster.ask(self.master)
        except CommandFailed:
            self.__exit__()
            raise

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()
        if self._shown is not None:
            self._shown.close()
        self.master.close()

    def _connect(self) -> MasterClient:
        return MasterClient(self._endpoint).share("cluster")

    def look(self) -> View:
        self._cluster.touch()
        snapshot = self._cluster.snapshot
        assert snapshot is not None, "the master has answered at the start"
        job = shown(snapshot.jobs, self._wanted)
        if job is not None and (self._shown is None or self._shown.job_id != job.job_id):
            if self._shown is not None:
                self._shown.close()
            self._shown = _Shown(self._connect, job)
        view = View(
            nodes=snapshot.nodes,
            jobs=snapshot.jobs,
            problem=snapshot.problem,
            trouble=self._cluster.trouble,
        )
        return view if job is None or self._shown is None else self._shown.add_to(view, job)

    def turn(self, by: int) -> None:
        """Show the job submitted `by` jobs after the shown one; negative: before it. The first and
        the last have no neighbour there."""
        names = [job.job_id for job in self.look().jobs]
        if self._shown is not None and self._shown.job_id in names:
            at = names.index(self._shown.job_id) + by
            self._wanted = names[max(0, min(at, len(names) - 1))]


class _Shown:
    """Feeds of the shown job."""

    def __init__(self, connect: Connect, job: pb.JobStatus) -> None:
        self.job_id = job.job_id
        self._history = JobFeed(connect, job.job_id, job.recorded_step, steps=_STEPS)
        since = log_time((job.finished_at or time.time()) - _OUTPUT_S)
        self._output = LogFeed(connect, job.job_id, since)
        #: Its events as lines, made anew when the feed has grown.
        self._lines: tuple[int, Sequence[str]] = 0, ()

    def close(self) -> None:
        self._history.close()
        self._output.close()

    def add_to(self, view: View, job: pb.JobStatus) -> View:
        version = self._history.version
        history = self._history.history(job.finished_at or time.time())
        if version != self._lines[0]:
            self._lines = version, tuple(event_line(dict(record)) for record in history.events)
        return replace(
            view, job=job, history=history, events=self._lines[1], lines=self._output.lines()
        )


def shown(jobs: Sequence[pb.JobStatus], wanted: str | None) -> pb.JobStatus | None:
    """Return the job to show; None: there is none.

    That is the wanted one, else one that trains, else the first queued one, else the newest.
    """
    named = [job for job in jobs if job.job_id == wanted]
    going = [job for job in jobs if job.state not in ENDED]
    begun = [job for job in going if job.state != "queued"]
    return next(iter([*named, *begun, *going, *reversed(jobs)]), None)

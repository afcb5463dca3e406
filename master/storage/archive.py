"""Files of jobs: metrics, evaluations, events and output, and whether the disk takes them.

The workers' output is in `logs/<node>-<slot>.log` of each job, bounded in size. Each line begins
with the time of its arrival, by which lines of several workers can be merged. A full file is
renamed to `<name>.log.1`, which replaces an earlier one.

While the disk is full, lines wait in memory, up to a bound, and workers' output is dropped. So a
full disk stops no job (`oobleck.master.storage.disk`). Must not know the journal.
"""

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.messages import EvaluationRecord, StepRecord
from oobleck.master.config import MasterConfig
from oobleck.master.storage.cluster_log import ClusterLog
from oobleck.master.storage.disk import Storage, StorageFailed, storing
from oobleck.master.storage.records import EvaluationLog, EventLog, MetricsLog

MOST_BYTES = 8 << 20
#: Characters at which a line is cut.
_MOST_LINE = 16_384
#: Most lines, and characters of them, by which a follower may lag; beyond that it loses lines.
_MOST_BEHIND, _MOST_CHARACTERS = 10_000, 4 << 20
_NAME = re.compile(r"(.+)-(\d+)\.log(\.1)?")


class Line(NamedTuple):
    time: str
    worker: WorkerId
    text: str


Wanted = Callable[[WorkerId], bool]


@dataclass(slots=True, eq=False)
class _Newest:
    """Newest lines of a job, shared by its followers."""

    followers: int = 0
    lines: deque[Line] = field(default_factory=deque)
    #: Number of the line after the last one, counted from the first follower's start.
    end: int = 0
    characters: int = 0

    def add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self.lines.append(line)
            self.end += 1
            self.characters += len(line.text)
            while len(self.lines) > _MOST_BEHIND or self.characters > _MOST_CHARACTERS:
                self.characters -= len(self.lines.popleft().text)


class Follower:
    """Reader of a job's output, from the moment it begins to follow."""

    def __init__(self, newest: _Newest, wanted: Wanted) -> None:
        self._newest, self._wanted = newest, wanted
        self._next = newest.end

    def take(self) -> Line | None:
        """Return the next line; None: there is none yet."""
        newest = self._newest
        first = newest.end - len(newest.lines)
        self._next = max(self._next, first)
        while self._next < newest.end:
            line = newest.lines[self._next - first]
            self._next += 1
            if self._wanted(line.worker):
                return line
        return None


class LogStore:
    def __init__(self, state_dir: Path, most_bytes: int = MOST_BYTES) -> None:
        self._jobs = state_dir / "jobs"
        self._most_bytes = most_bytes
        #: Newest lines of the jobs that are followed.
        self._newest: dict[JobId, _Newest] = {}

    def append(self, job_id: JobId, worker: WorkerId, lines: Sequence[str], unix: float) -> None:
        stamp = datetime.fromtimestamp(unix, UTC).isoformat(timespec="microseconds")
        entries = [Line(stamp, worker, text[:_MOST_LINE]) for text in lines]
        path = self._jobs / job_id / "logs" / f"{worker.node}-{worker.slot}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > self._most_bytes:
            path.replace(path.with_suffix(".log.1"))
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{entry.time} {entry.text}\n" for entry in entries)
        if job_id in self._newest:
            self._newest[job_id].add(entries)

    @contextmanager
    def follow(self, job_id: JobId, wanted: Wanted) -> Iterator[Follower]:
        newest = self._newest.setdefault(job_id, _Newest())
        newest.followers += 1
        try:
            yield Follower(newest, wanted)
        finally:
            newest.followers -= 1
            if not newest.followers:
                del self._newest[job_id]

    def snapshot(self, job_id: JobId, wanted: Wanted, since: str = "") -> Iterator[Line]:
        """Return the lines so far from the time `since` on, sorted by time. Files are opened now,
        and read as the result is consumed."""
        opened: list[tuple[WorkerId, BufferedReader, int]] = []
        for path in sorted((self._jobs / job_id / "logs").glob("*.log*")):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            worker = WorkerId(NodeName(match[1]), int(match[2]))
            if wanted(worker):
                opened.append((worker, open(path, "rb"), path.stat().st_size))  # noqa: SIM115
        merged = heapq.merge(*(_read(*entry) for entry in opened), key=lambda line: line.time)
        return (line for line in merged if line.time >= since)


def _read(worker: WorkerId, file: BufferedReader, size: int) -> Iterator[Line]:
    with file:
        while file.tell() < size:
            stamp, _, text = file.readline().decode(errors="replace").rstrip("\n").partition(" ")
            yield Line(stamp, worker, text)


@dataclass(slots=True)
class _Gap:
    """Gap in a job's records: missing steps that later records wait for, and since when."""

    missing: range = range(0)
    since: float = 0.0
    #: Last step whose record waited, or was expected, when the gap was noticed.
    behind: int = 0
    #: True if an earlier gap was given up since.
    passed: bool = False


class Archive:
    def __init__(self, config: MasterConfig) -> None:
        self._config = config
        self.storage = Storage(config.state_dir)
        self.events = EventLog(config.state_dir)
        self.cluster = ClusterLog()
        self.logs = LogStore(config.state_dir)
        self._metrics: dict[JobId, MetricsLog] = {}
        self._evaluations: dict[JobId, EvaluationLog] = {}
        #: Logs with unwritten lines, oldest first.
        self._unwritten: dict[MetricsLog | EvaluationLog, None] = {}
        self._gaps: dict[JobId, _Gap] = {}

    def metrics(self, job_id: JobId) -> MetricsLog:
        """Return the job's log of metrics, and open it the first time. Raises StorageFailed."""
        if job_id not in self._metrics:
            self._metrics[job_id] = MetricsLog(self._path(job_id, "metrics.jsonl"))
        return self._metrics[job_id]

    def evaluations(self, job_id: JobId) -> EvaluationLog:
        """Return the job's log of evaluations, and open it the first time. Raises StorageFailed."""
        if job_id not in self._evaluations:
            self._evaluations[job_id] = EvaluationLog(self._path(job_id, "evaluations.jsonl"))
        return self._evaluations[job_id]

    def take_records(
        self, job_id: JobId, records: tuple[StepRecord, ...]
    ) -> tuple[StepRecord, ...]:
        """Take records and return those that are new, in step order."""
        metrics = self.metrics(job_id)
        self._unwritten[metrics] = None
        new = metrics.append(records)
        if metrics.waits:
            self._gaps.setdefault(job_id, _Gap())
        return new

    def expect(self, job_id: JobId, last: int) -> None:
        """Note that the job has committed the steps up to `last`."""
        metrics = self.metrics(job_id)
        metrics.expect(last)
        if metrics.waits:
            self._gaps.setdefault(job_id, _Gap())

    def has_waiting(self, job_id: JobId) -> bool:
        """Return whether records wait for missing ones, without which they are written after some
        time."""
        return job_id in self._gaps and not self.storage.problem and self.metrics(job_id).waits

    def held_up(self) -> list[JobId]:
        """Return the jobs whose records waited for disk space that is free now."""
        return [job_id for job_id in self._gaps if self.metrics(job_id).is_held_up]

    def given_up(self, now: float, late_s: float) -> dict[JobId, range]:
        """Return the steps whose records are given up: later ones have waited too long for them.
        `late_s`: the master's own delay, which does not count. A gap that follows a given-up one
        counts from the same time."""
        given_up = {}
        for job_id, gap in list(self._gaps.items()):
            metrics = self.metrics(job_id)
            missing = metrics.missing
            gap.since += max(0.0, late_s)
            if not metrics.waits:
                del self._gaps[job_id]
                continue
            lasts = missing == gap.missing or (gap.passed and missing.stop <= gap.behind)
            if self.storage.problem or not lasts:
                self._gaps[job_id] = _Gap(missing, now, metrics.furthest)
            elif missing and now - gap.since < self._config.records_wait_s:
                gap.missing, gap.passed = missing, False
            elif missing:
                gap.passed = True
                given_up[job_id] = missing
        return given_up

    def lose(self, job_id: JobId, steps: range) -> None:
        """Give up the records of these steps."""
        self.metrics(job_id).lose(steps)

    def take_evaluation(self, job_id: JobId, record: EvaluationRecord) -> bool:
        """Take an evaluation and return whether it is new."""
        evaluations = self.evaluations(job_id)
        self._unwritten[evaluations] = None
        return evaluations.append(record)

    def take_output(self, job_id: JobId, worker: WorkerId, lines: Sequence[str], at: float) -> None:
        if self.storage.problem:
            return
        try:
            with storing(self._path(job_id, "logs")):
                self.logs.append(job_id, worker, lines, at)
        except StorageFailed as failed:
            self.storage.failed(failed)

    def forget(self, job_id: JobId) -> None:
        """Write what still waits, and forget the job. Its files are complete then, and stay."""
        self._gaps.pop(job_id, None)
        self.write()
        if self.storage.problem:  # some records may still wait
            return
        self.events.forget(job_id)
        for known in (self._metrics, self._evaluations):
            known.pop(job_id, None)

    def write(self) -> None:
        """Write waiting lines, unless a write has failed and the disk has had no space since."""
        if self.storage.problem:
            return
        try:
            self.events.write()
            for steps in list(self._unwritten):
                steps.write()
                del self._unwritten[steps]
        except StorageFailed as failed:
            self.storage.failed(failed)

    def asks_again(self) -> bool:
        """Return, once, whether records were dropped while the disk was full."""
        left = [metrics for metrics in self._metrics.values() if metrics.left_some]
        for metrics in left:
            metrics.left_some = False
        return bool(left)

    def _path(self, job_id: JobId, name: str) -> Path:
        return self._config.job_directory(job_id) / name

"""The workers' output: `logs/<node>-<slot>.log` of each job, bounded in size, and those who follow.

Each line stands behind the time of its arrival, so that the lines of several workers can be put
in order. A full file becomes `<name>.log.1` in place of the one before it.
"""

import asyncio
import heapq
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from oobleck.core.ids import JobId, NodeName, WorkerId

MOST_BYTES = 8 << 20
#: A longer line is cut; it is not text that anybody reads.
_MOST_LINE = 16_384
#: A follower that is this many lines behind loses lines.
_MOST_BEHIND = 10_000
_NAME = re.compile(r"(.+)-(\d+)\.log(\.1)?")


class Line(NamedTuple):
    time: str
    worker: WorkerId
    text: str


Wanted = Callable[[WorkerId], bool]


@dataclass(slots=True, eq=False)
class Follower:
    """Gets every line from its start on, in a queue that drops the oldest when it is full."""

    job_id: JobId
    wanted: Wanted
    queue: asyncio.Queue[Line] = field(default_factory=lambda: asyncio.Queue(_MOST_BEHIND))

    def offer(self, line: Line) -> None:
        if self.queue.full():
            self.queue.get_nowait()
        self.queue.put_nowait(line)


class LogStore:
    def __init__(self, state_dir: Path, most_bytes: int = MOST_BYTES) -> None:
        self._jobs = state_dir / "jobs"
        self._most_bytes = most_bytes
        self._followers: set[Follower] = set()

    def append(self, job_id: JobId, worker: WorkerId, lines: Sequence[str], unix: float) -> None:
        stamp = datetime.fromtimestamp(unix, UTC).isoformat(timespec="microseconds")
        entries = [Line(stamp, worker, text[:_MOST_LINE]) for text in lines]
        path = self._jobs / job_id / "logs" / f"{worker.node}-{worker.slot}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > self._most_bytes:
            path.replace(path.with_suffix(".log.1"))
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(f"{entry.time} {entry.text}\n" for entry in entries)
        for follower in self._followers:
            if follower.job_id == job_id and follower.wanted(worker):
                for entry in entries:
                    follower.offer(entry)

    @contextmanager
    def follow(self, job_id: JobId, wanted: Wanted) -> Iterator[Follower]:
        follower = Follower(job_id, wanted)
        self._followers.add(follower)
        try:
            yield follower
        finally:
            self._followers.discard(follower)

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

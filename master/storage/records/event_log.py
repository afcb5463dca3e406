"""events.jsonl of every job: its lines, numbered from 1, each written exactly once.

The lines follow from the journal, so a crash can cost a file only those of the last commits. The
next start makes all lines again and skips those that the file has, by their numbers. A file with
more lines than the journal gives shows that the journal has lost its end. Memory holds only
lines that are not in a file yet.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from oobleck.core.codec import decode
from oobleck.core.ids import JobId
from oobleck.master.storage.disk import storing
from oobleck.master.storage.records.json_lines import JsonLines, whole_lines
from oobleck.master.storage.records.plan_lines import EventLine


class EventLog:
    def __init__(self, state_dir: Path) -> None:
        self._jobs = state_dir / "jobs"
        #: How many lines the journal has given so far.
        self._given: dict[JobId, int] = {}
        self._files: dict[JobId, JsonLines] = {}
        #: Number of the last line that is in the file, or waits to be.
        self._known: dict[JobId, int] = {}
        #: Files that have grown since they were last forced to the disk.
        self._unsynced: set[JobId] = set()

    @property
    def given(self) -> Mapping[JobId, int]:
        return self._given

    def resume(self, given: Mapping[JobId, int]) -> None:
        """Go on behind so many lines, which came of events that are not replayed."""
        for job_id, count in given.items():
            self._given[job_id] = max(self._given.get(job_id, 0), count)

    def add(self, job_id: JobId, line: EventLine, unix: float) -> None:
        """Number the line; `write` puts it into the file, if it is not there."""
        number = self._given.get(job_id, 0) + 1
        self._given[job_id] = number
        if number > self._known_of(job_id):
            self._files[job_id].add(msgspec.json.encode({"id": number, "time": unix, **line}))
            self._known[job_id] = number

    def ahead(self) -> dict[JobId, int]:
        """Files that have more than the journal has given, and how many."""
        counts = {job_id: self._known_of(job_id) for job_id in self._given}
        return {job_id: n for job_id, n in counts.items() if n > self._given[job_id]}

    def write(self) -> None:
        """Bring all files up to date. Raises StorageFailed; what is not written then waits."""
        for job_id, file in self._files.items():
            if file.unwritten:
                file.write()
                self._unsynced.add(job_id)

    def sync(self) -> None:
        """Have all that was written on the disk, so that it need not be made again. Raises
        StorageFailed."""
        for job_id in sorted(self._unsynced):
            path = self._path(job_id)
            with storing(path), open(path, "rb") as file:
                os.fsync(file.fileno())
        self._unsynced.clear()

    def read(self, job_id: JobId, offset: int) -> tuple[list[str], int]:
        """Whole lines of the file from the byte `offset` on, some at a time, and where they end."""
        try:
            with open(self._path(job_id), "rb") as file:
                file.seek(offset)
                text = whole_lines(file)
        except FileNotFoundError:
            return [], offset
        return text.decode().splitlines(), offset + len(text)

    def forget(self, job_id: JobId) -> None:
        for known in (self._given, self._known, self._files):
            known.pop(job_id, None)
        self._unsynced.discard(job_id)

    def _path(self, job_id: JobId) -> Path:
        return self._jobs / job_id / "events.jsonl"

    def _known_of(self, job_id: JobId) -> int:
        if job_id not in self._files:
            file = JsonLines(self._path(job_id), "events-torn", sync=False)
            self._known[job_id] = max((last.id for last in file.recover(_read, 1)), default=0)
            self._files[job_id] = file
        return self._known[job_id]


class _Number(msgspec.Struct):
    id: int


_read = partial(decode, _Number)

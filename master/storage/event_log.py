"""events.jsonl of every job: its records, numbered from 1, each written exactly once.

The records follow from the journal, so after a crash the file lacks at most those of the last
commits: they are made again on the start, and those that the file has are passed over by their
numbers. A file that has more than the journal gives shows that the journal has lost its end.
Only records that are not in a file yet are kept in memory.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from oobleck.master.storage.disk import append, storing
from oobleck.master.storage.json_lines import recover
from oobleck.master.storage.plan_records import Record
from oobleck.planner.codec import decode
from oobleck.planner.ids import JobId

#: Read at a time for an operator.
_READ_BYTES = 1 << 20


class EventLog:
    def __init__(self, state_dir: Path) -> None:
        self._jobs = state_dir / "jobs"
        #: How many records the journal has given so far.
        self._given: dict[JobId, int] = {}
        #: Number of the last record in the file.
        self._written: dict[JobId, int] = {}
        self._waiting: dict[JobId, list[bytes]] = {}
        #: Files that have grown since they were last forced to the disk.
        self._unsynced: set[JobId] = set()

    @property
    def given(self) -> Mapping[JobId, int]:
        return self._given

    def resume(self, given: Mapping[JobId, int]) -> None:
        """Go on behind so many records, which came of events that are not replayed."""
        for job_id, count in given.items():
            self._given[job_id] = max(self._given.get(job_id, 0), count)

    def add(self, job_id: JobId, record: Record, unix: float) -> None:
        """Number the record; `write` puts it into the file, if it is not there."""
        number = self._given.get(job_id, 0) + 1
        self._given[job_id] = number
        if number > self._in_file(job_id):
            line = msgspec.json.encode({"id": number, "time": unix, **record}) + b"\n"
            self._waiting.setdefault(job_id, []).append(line)

    def ahead(self) -> dict[JobId, int]:
        """Files that have more than the journal has given, and how many."""
        counts = {job_id: self._in_file(job_id) for job_id in self._given}
        return {job_id: n for job_id, n in counts.items() if n > self._given[job_id]}

    def write(self) -> None:
        """Bring all files up to date. Raises StorageFailed; what is not written then waits."""
        for job_id, lines in list(self._waiting.items()):
            path = self._path(job_id)
            with storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    append(descriptor, b"".join(lines), torn="events-torn", sync=False)
                finally:
                    os.close(descriptor)
            self._written[job_id] = self._in_file(job_id) + len(lines)
            self._unsynced.add(job_id)
            del self._waiting[job_id]

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
                text = file.read(_READ_BYTES)
                while text and b"\n" not in text and (more := file.read(_READ_BYTES)):
                    text += more
        except FileNotFoundError:
            return [], offset
        text = text[: text.rfind(b"\n") + 1]
        return text.decode().splitlines(), offset + len(text)

    def forget(self, job_id: JobId) -> None:
        for known in (self._given, self._written, self._waiting):
            known.pop(job_id, None)
        self._unsynced.discard(job_id)

    def _path(self, job_id: JobId) -> Path:
        return self._jobs / job_id / "events.jsonl"

    def _in_file(self, job_id: JobId) -> int:
        if job_id not in self._written:
            self._written[job_id] = _last_number(self._path(job_id))
        return self._written[job_id]


class _Number(msgspec.Struct):
    id: int


def _last_number(path: Path) -> int:
    """Of the last whole line, after one that was cut off is removed; 0: there is none."""
    return next(iter(recover(path, _number, 1)), 0)


def _number(line: bytes) -> int:
    return decode(_Number, line).id

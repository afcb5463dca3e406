"""JSON lines of each job: events.jsonl, metrics.jsonl and evaluations.jsonl.

Files are only appended to, and open only while lines are written. Lines that cannot be written wait
in memory.

Each line of events.jsonl is numbered from 1 and written exactly once. Lines follow from the
journal, so a crash can cost a file only those of the last commits; the next start makes all lines
again and skips those that the file has. A file with more lines shows that the end of the journal is
lost.

The other two have one line per committed step, or per evaluation, in step order, exactly once. The
last whole line has the last step, and readers find a step by bisection. Must not know where records
come from, nor who reads them.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.ids import JobId
from oobleck.core.messages import EvaluationRecord, StepRecord
from oobleck.master.state.job_observed import RECENT_RECORDS
from oobleck.master.storage.disk import StorageFailed, append, storing
from oobleck.master.storage.incident_lines import EventLine

T = TypeVar("T")
#: Bytes at the end of a file to read first: enough for the last lines of most files.
_TAIL_BYTES = 64 * 1024
#: Bytes read at a time for each reader, which holds them until they are sent.
_READ_BYTES = 16 << 10
#: Most records that wait for earlier ones; further ones are dropped, and must be sent again.
_MOST_WAITING = 10_000


class JsonLines:
    """File of JSON lines, with the lines that are not yet written to it."""

    def __init__(self, path: Path, torn: str, *, sync: bool = True) -> None:
        """Open no file yet. `torn`: crash point in a write; `sync`: force writes to the disk."""
        self.path = path
        self._torn, self._sync = torn, sync
        self._unwritten: list[bytes] = []

    def recover(self, read: Callable[[bytes], T], most: int) -> tuple[T, ...]:
        """Cut off an incomplete end, for which `read` raises ValueError, and return the last lines,
        up to `most`, as `read` parses them; none where there is no file. Raises StorageFailed."""
        with storing(self.path):
            if not self.path.exists():
                return ()
            if not self.path.is_file():
                raise StorageFailed(f"{self.path} is not a regular file; move it away")
            return _recover(self.path, read, most)

    def add(self, line: bytes) -> None:
        self._unwritten.append(line + b"\n")

    @property
    def unwritten(self) -> int:
        return len(self._unwritten)

    def write(self) -> None:
        """Write all added lines to the file. Raises StorageFailed; then none of them is in it."""
        if not self._unwritten:
            return
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                data = b"".join(self._unwritten)
                append(file.fileno(), data, torn=self._torn, sync=self._sync)
        self._unwritten.clear()


def whole_lines(file: BinaryIO) -> bytes:
    """Read some whole lines from the file's position on; empty: there are no more."""
    text = file.read(_READ_BYTES)
    while text and b"\n" not in text and (more := file.read(len(text))):
        text += more
    return text[: text.rfind(b"\n") + 1]


def _recover(path: Path, read: Callable[[bytes], T], most: int) -> tuple[T, ...]:
    with open(path, "r+b", buffering=0) as file:
        size, tail_bytes = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            start, end = max(0, size - tail_bytes), size
            file.seek(start)
            # The first piece is the end of a line that began before the tail.
            lines = file.read().splitlines(keepends=True)[1 if start else 0 :]
            while lines and not _is_whole(lines[-1], read):
                end -= len(lines.pop())
            if start == 0 or len(lines) >= most:
                break
            tail_bytes *= 2
        if end != size:
            file.truncate(end)
            os.fsync(file.fileno())
    return tuple(read(line) for line in lines[-most:])


def _is_whole(line: bytes, read: Callable[[bytes], object]) -> bool:
    try:
        read(line)
    except ValueError:
        return False
    return line.endswith(b"\n")


class EventLog:
    def __init__(self, state_dir: Path) -> None:
        self._jobs = state_dir / "jobs"
        #: Number of lines so far, by the journal.
        self._given: dict[JobId, int] = {}
        self._files: dict[JobId, JsonLines] = {}
        #: Number of the last line that is in the file or waits to be written.
        self._known: dict[JobId, int] = {}
        #: Jobs whose files have grown since they were last synced to disk.
        self._unsynced: set[JobId] = set()

    @property
    def given(self) -> Mapping[JobId, int]:
        return self._given

    def resume(self, given: Mapping[JobId, int]) -> None:
        """Continue after these numbers of lines, from events before the snapshot."""
        for job_id, count in given.items():
            self._given[job_id] = max(self._given.get(job_id, 0), count)

    def add(self, job_id: JobId, line: EventLine, unix: float) -> None:
        """Number the line; `write` appends it, unless the file has it already."""
        number = self._given.get(job_id, 0) + 1
        self._given[job_id] = number
        if number > self._known_of(job_id):
            self._files[job_id].add(msgspec.json.encode({"id": number, "time": unix, **line}))
            self._known[job_id] = number

    def ahead(self) -> dict[JobId, int]:
        """Return the number of lines of each file that has more than follow from the journal."""
        counts = {job_id: self._known_of(job_id) for job_id in self._given}
        return {job_id: n for job_id, n in counts.items() if n > self._given[job_id]}

    def write(self) -> None:
        """Write all waiting lines. Raises StorageFailed; unwritten lines wait then."""
        for job_id, file in self._files.items():
            if file.unwritten:
                file.write()
                self._unsynced.add(job_id)

    def sync(self) -> None:
        """Sync all written lines to disk, so that they need not be made again. Raises
        StorageFailed."""
        for job_id in sorted(self._unsynced):
            path = self._path(job_id)
            with storing(path), open(path, "rb") as file:
                os.fsync(file.fileno())
        self._unsynced.clear()

    def read(self, job_id: JobId, offset: int) -> tuple[list[str], int]:
        """Return some whole lines from the byte `offset` on, and where they end."""
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


class MetricsLog:
    """Log of step records. A record that arrives early waits for earlier ones."""

    def __init__(self, path: Path) -> None:
        """Recover the file's last records. Raises StorageFailed."""
        self.path = path
        self._lines = JsonLines(path, "metrics-torn")
        self._waiting: dict[int, StepRecord] = {}
        #: Last records on disk.
        self.recent = self._lines.recover(partial(decode, StepRecord), RECENT_RECORDS)
        #: True if records were dropped because too many wait.
        self.left_some = False
        #: Last step up to which all records were taken; up to `stored_step` they are on disk.
        self.through_step = self.recent[-1].step if self.recent else 0
        #: Last step whose record is on disk.
        self.stored_step = self.through_step
        #: The last step that the job has committed; 0: not known.
        self._last = 0
        #: Ranges of steps whose records are lost, which are skipped, by their first step.
        self._lost: dict[int, range] = {}
        #: Number of steps so far that training skipped. Each line has it, so the last line restores
        #: it.
        self._skipped_steps = self.recent[-1].skipped_steps if self.recent else 0

    @property
    def is_stored(self) -> bool:
        """True if all taken records are on disk, except those that wait for earlier ones."""
        return not self._lines.unwritten

    def start_after(self, step: int) -> None:
        """Begin after `step`, since the job began at a checkpoint: earlier steps have no
        records."""
        self._go_on(step)

    def expect(self, last: int) -> None:
        """Expect records of the steps up to `last`, which the job has committed."""
        self._last = last

    def lose(self, steps: range) -> None:
        """Skip these steps, once all earlier records are taken."""
        self._lost[steps.start] = steps
        self._pass_over()

    def _pass_over(self) -> None:
        following = self.through_step + 1
        for steps in [steps for steps in self._lost.values() if steps.start <= following]:
            del self._lost[steps.start]
            self._go_on(steps.stop - 1)

    def _go_on(self, step: int) -> None:
        self.through_step = max(self.through_step, step)
        if not self._lines.unwritten:
            self.stored_step = self.through_step
        for early in [early for early in self._waiting if early <= self.through_step]:
            del self._waiting[early]

    def append(self, records: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
        """Take `records`; return the new ones, in step order. `write` puts them on disk."""
        for record in records:
            if record.step <= self.through_step:
                continue
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.setdefault(record.step, record)
            else:
                self.left_some = True
        new = []
        while self._lines.unwritten < _MOST_WAITING:
            following = self._waiting.pop(self.through_step + 1, None)
            if following is None:
                break
            self._skipped_steps += following.skipped
            record = msgspec.structs.replace(following, skipped_steps=self._skipped_steps)
            self._lines.add(encode(record))
            self.through_step = record.step
            new.append(record)
            self._pass_over()
        return tuple(new)

    @property
    def waits(self) -> bool:
        """True if records wait for earlier ones, or are expected."""
        return bool(self._waiting) or self.through_step < self._last

    @property
    def furthest(self) -> int:
        """Last step that has a record, or that the job has committed."""
        return max((self.through_step, self._last, *self._waiting))

    @property
    def missing(self) -> range:
        """Steps whose records are missing: later ones wait for them, or they are expected. Empty
        until all earlier records are on disk."""
        if not self.waits or self._lines.unwritten:
            return range(0)
        end = self._last + 1 if self.through_step < self._last else math.inf
        return range(self.through_step + 1, int(min((end, *self._waiting, *self._lost))))

    @property
    def is_held_up(self) -> bool:
        """True if records wait only for disk space."""
        full = self._lines.unwritten >= _MOST_WAITING
        return not full and self.through_step + 1 in self._waiting

    def write(self) -> None:
        """Write all taken records to disk. Raises StorageFailed; then none of them is there."""
        self._lines.write()
        self.stored_step = self.through_step


class EvaluationLog:
    """Log of evaluations. They arrive in order: every worker reports one before it continues."""

    def __init__(self, path: Path) -> None:
        """Recover the newest evaluation. Raises StorageFailed."""
        self.path = path
        self._lines = JsonLines(path, "evaluations-torn")
        #: The newest evaluation.
        self.last = next(iter(self._lines.recover(partial(decode, EvaluationRecord), 1)), None)

    @property
    def stored_step(self) -> int:
        """Last evaluated step on disk; 0 while the newest evaluation is not on disk."""
        return self.last.step if self.last is not None and self.is_stored else 0

    @property
    def is_stored(self) -> bool:
        """True if all taken records are on disk."""
        return not self._lines.unwritten

    def append(self, record: EvaluationRecord) -> bool:
        """Take `record`, and return whether it is new. `write` puts it on disk."""
        if self.last is not None and record.step <= self.last.step:
            return False
        values = {
            "step": record.step,
            "loss": record.loss,
            "perplexity": perplexity(record.loss),
            "samples": record.samples,
            "generation": record.generation,
            "seconds": record.seconds,
            "time": record.time,
            **({"metrics": record.metrics} if record.metrics else {}),
            **({"told_by": record.told_by} if record.told_by else {}),
        }
        self._lines.add(msgspec.json.encode(values))
        self.last = record
        return True

    def write(self) -> None:
        """Write all taken records to disk. Raises StorageFailed; then none of them is there."""
        self._lines.write()


class _Step(msgspec.Struct):
    step: int


def read_steps(path: Path, first: int) -> tuple[list[str], int]:
    """Return some lines from the step `first` on, and the step at which to continue. Slow: it reads
    the disk."""
    try:
        with open(path, "rb") as file:
            file.seek(_find(file, first))
            lines = whole_lines(file).splitlines()
    except FileNotFoundError:
        return [], first
    if not lines:
        return [], first
    return [line.decode() for line in lines], decode(_Step, lines[-1]).step + 1


def _find(file: BinaryIO, step: int) -> int:
    """Return the offset of the first line of `step` or a later step; the end of the file if there
    is none."""

    def skip_line_before(offset: int) -> None:
        file.seek(max(0, offset - 1))
        if offset:
            file.readline()

    def step_behind(offset: int) -> int:
        """Return the step of the first line that begins at `offset` or later; at the end,
        `step`."""
        skip_line_before(offset)
        line = file.readline()
        return decode(_Step, line).step if line.endswith(b"\n") else step

    skip_line_before(bisect_left(range(file.seek(0, os.SEEK_END)), step, key=step_behind))
    return file.tell()


def perplexity(loss: float | None) -> float | None:
    """Return the perplexity of a loss; None: there is no loss, or the result is not finite."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None

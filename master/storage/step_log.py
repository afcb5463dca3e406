"""metrics.jsonl: one line per committed step, in step order, exactly once, whatever fails.

A record that comes early waits for those before it, one that comes again is dropped. What the disk
does not take waits in memory, and nobody is told that it is on disk. On opening,
a last line that was cut off is removed; the file's last whole line says how far it goes, so that
nothing else has to remember it. The file is open only while lines are added, from the first one
to `close`, so that a master may know any number of jobs. Must not know where records come from.
"""

from io import FileIO
from pathlib import Path

import msgspec

from oobleck.host.ipc.messages import StepRecord
from oobleck.master.state.job_observed import RECENT_RECORDS
from oobleck.master.storage.disk import append
from oobleck.master.storage.json_lines import recover
from oobleck.planner.codec import decode, encode

#: Records that may wait for one before them; more are left to be sent again.
_MOST_WAITING = 10_000


class MetricsLog:
    def __init__(self, path: Path) -> None:
        """Cut what is not a whole line off the end of the file, if there is one."""
        self._path = path
        self._file: FileIO | None = None
        self._waiting: dict[int, StepRecord] = {}
        #: The last records on disk.
        self.recent = recover(path, _read, RECENT_RECORDS)
        #: Whether records were left because too many wait.
        self.left_some = False
        #: Lines that are not on disk yet.
        self._unwritten: list[bytes] = []
        #: Steps up to this one have come; those up to `stored_step` are on disk.
        self.through_step = self.recent[-1].step if self.recent else 0
        #: How many of them were skipped. Each line has the number, so that the last one tells it.
        self._skipped_steps = self.recent[-1].skipped_steps if self.recent else 0

    @property
    def stored_step(self) -> int:
        """Steps up to this one are on disk."""
        return self.through_step - len(self._unwritten)

    def start_after(self, step: int) -> None:
        """The job began at a checkpoint: records of steps up to this one never come."""
        self.through_step = max(self.through_step, step)
        for early in [early for early in self._waiting if early <= self.through_step]:
            del self._waiting[early]

    def append(self, records: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
        """Take `records`; returns those that are new, in step order; `write` has them on disk."""
        for record in records:
            if record.step <= self.through_step:
                continue
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.setdefault(record.step, record)
            else:
                self.left_some = True
        new = []
        while len(self._unwritten) < _MOST_WAITING:
            following = self._waiting.pop(self.through_step + 1, None)
            if following is None:
                break
            self._skipped_steps += following.skipped
            record = msgspec.structs.replace(following, skipped_steps=self._skipped_steps)
            self._unwritten.append(encode(record) + b"\n")
            self.through_step = record.step
            new.append(record)
        return tuple(new)

    @property
    def waits(self) -> bool:
        """Whether records wait for those of steps before."""
        return bool(self._waiting)

    @property
    def missing(self) -> range:
        """Steps whose records others wait for, once all before them are on disk."""
        if not self._waiting or self._unwritten:
            return range(0)
        return range(self.through_step + 1, min(self._waiting))

    def pass_over(self) -> tuple[StepRecord, ...]:
        """The missing records never come; returns those that waited for them, as new ones."""
        self.start_after(self.missing.stop - 1)
        return self.append(())

    def write(self) -> None:
        """Put all that was taken on disk. Raises OSError; then nothing of it is."""
        if not self._unwritten:
            return
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        append(self._file.fileno(), b"".join(self._unwritten), torn="metrics-torn", sync=True)
        self._unwritten.clear()

    def close(self) -> None:
        """Until there is more to add."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(text: bytes) -> StepRecord:
    return decode(StepRecord, text)

"""metrics.jsonl and evaluations.jsonl: one line per committed step, or per evaluation, in step
order, exactly once, whatever fails.

What comes again is dropped. The last whole line of a file says how far it goes, so that nothing
else has to remember it. Readers find a step by bisection, so that a long file costs them no more
than a short one. Must not know where records come from, nor who reads them.
"""

import math
import os
from bisect import bisect_left
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.messages import EvaluationRecord, StepRecord
from oobleck.master.state.job_observed import RECENT_RECORDS
from oobleck.master.storage.records.json_lines import JsonLines, whole_lines

#: Records that may wait for one before them; more are left to be sent again.
_MOST_WAITING = 10_000


class MetricsLog:
    """A record that comes early waits for those before it."""

    def __init__(self, path: Path) -> None:
        """Raises StorageFailed."""
        self.path = path
        self._lines = JsonLines(path, "metrics-torn")
        self._waiting: dict[int, StepRecord] = {}
        #: The last records on disk.
        self.recent = self._lines.recover(partial(decode, StepRecord), RECENT_RECORDS)
        #: Whether records were left because too many wait.
        self.left_some = False
        #: Steps up to this one have come; those up to `stored_step` are on disk.
        self.through_step = self.recent[-1].step if self.recent else 0
        #: The same without lines that are not written yet.
        self.stored_step = self.through_step
        #: The last step that the job has committed; 0: not known.
        self._last = 0
        #: Steps whose records are lost, which are passed over; by the first of each range.
        self._lost: dict[int, range] = {}
        #: How many of them were skipped. Each line has the number, so that the last one tells it.
        self._skipped_steps = self.recent[-1].skipped_steps if self.recent else 0

    @property
    def is_stored(self) -> bool:
        """Return whether all taken records are on disk, except those that wait for others."""
        return not self._lines.unwritten

    def start_after(self, step: int) -> None:
        """The job began at a checkpoint: records of steps up to this one never come."""
        self._go_on(step)

    def expect(self, last: int) -> None:
        """Know that the job has committed the steps up to `last`, so each has had a record."""
        self._last = last

    def lose(self, steps: range) -> None:
        """Pass over the records of these steps, once all before them have come."""
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
        """Take `records`; returns those that are new, in step order; `write` has them on disk."""
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
        """Return whether records wait for those of earlier steps, or are expected."""
        return bool(self._waiting) or self.through_step < self._last

    @property
    def furthest(self) -> int:
        """The last step that a record has come of, or that the job has committed."""
        return max((self.through_step, self._last, *self._waiting))

    @property
    def missing(self) -> range:
        """Steps whose records others wait for, or that are expected, once all before them are on
        disk."""
        if not self.waits or self._lines.unwritten:
            return range(0)
        end = self._last + 1 if self.through_step < self._last else math.inf
        return range(self.through_step + 1, int(min((end, *self._waiting, *self._lost))))

    @property
    def is_held_up(self) -> bool:
        """True if records wait for room alone."""
        full = self._lines.unwritten >= _MOST_WAITING
        return not full and self.through_step + 1 in self._waiting

    def write(self) -> None:
        """Put all that was taken on disk. Raises StorageFailed; then nothing of it is."""
        self._lines.write()
        self.stored_step = self.through_step


class EvaluationLog:
    """Every worker tells of every evaluation before it goes on, so none comes early."""

    def __init__(self, path: Path) -> None:
        """Raises StorageFailed."""
        self.path = path
        self._lines = JsonLines(path, "evaluations-torn")
        #: The newest evaluation.
        self.last = next(iter(self._lines.recover(partial(decode, EvaluationRecord), 1)), None)

    @property
    def stored_step(self) -> int:
        """Evaluations up to this step are on disk; 0 while the newest one is not."""
        return self.last.step if self.last is not None and self.is_stored else 0

    @property
    def is_stored(self) -> bool:
        """Return whether all taken records are on disk."""
        return not self._lines.unwritten

    def append(self, record: EvaluationRecord) -> bool:
        """Take `record`; returns whether it is new. `write` has it on disk."""
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
        """Put all that was taken on disk. Raises StorageFailed; then nothing of it is."""
        self._lines.write()


class _Step(msgspec.Struct):
    step: int


def read_steps(path: Path, first: int) -> tuple[list[str], int]:
    """Lines of the step `first` and later ones, some at a time, and the step to go on with; none
    where there are none. Slow: not for the event loop."""
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
    """Return the offset of the first line of `step` or a later one; the end of the file if none."""

    def skip_line_before(offset: int) -> None:
        file.seek(max(0, offset - 1))
        if offset:
            file.readline()

    def step_behind(offset: int) -> int:
        """Return the step of the first line that begins at `offset` or later; `step` at the end."""
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

"""metrics.jsonl and evaluations.jsonl: one line per committed step, or per evaluation, in step
order, exactly once, whatever fails.

What comes again is dropped. The last whole line of a file says how far it goes, so that nothing
else has to remember it. Must not know where records come from.
"""

import math
from functools import partial
from pathlib import Path

import msgspec

from oobleck.host.ipc.messages import EvaluationRecord, StepRecord
from oobleck.master.state.job_observed import RECENT_RECORDS
from oobleck.master.storage.json_lines import JsonLines
from oobleck.planner.codec import decode, encode

#: Records that may wait for one before them; more are left to be sent again.
_MOST_WAITING = 10_000


class MetricsLog:
    """A record that comes early waits for those before it."""

    def __init__(self, path: Path) -> None:
        """Raises StorageFailed."""
        self._lines = JsonLines(path, "metrics-torn")
        self._waiting: dict[int, StepRecord] = {}
        #: The last records on disk.
        self.recent = self._lines.recover(partial(decode, StepRecord), RECENT_RECORDS)
        #: Whether records were left because too many wait.
        self.left_some = False
        #: Steps up to this one have come; those up to `stored_step` are on disk.
        self.through_step = self.recent[-1].step if self.recent else 0
        #: How many of them were skipped. Each line has the number, so that the last one tells it.
        self._skipped_steps = self.recent[-1].skipped_steps if self.recent else 0

    @property
    def stored_step(self) -> int:
        """Steps up to this one are on disk."""
        return self.through_step - self._lines.unwritten

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
        while self._lines.unwritten < _MOST_WAITING:
            following = self._waiting.pop(self.through_step + 1, None)
            if following is None:
                break
            self._skipped_steps += following.skipped
            record = msgspec.structs.replace(following, skipped_steps=self._skipped_steps)
            self._lines.add(encode(record))
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
        if not self._waiting or self._lines.unwritten:
            return range(0)
        return range(self.through_step + 1, min(self._waiting))

    def pass_over(self) -> tuple[StepRecord, ...]:
        """The missing records never come; returns those that waited for them, as new ones."""
        self.start_after(self.missing.stop - 1)
        return self.append(())

    def write(self) -> None:
        """Put all that was taken on disk. Raises StorageFailed; then nothing of it is."""
        self._lines.write()


class EvaluationLog:
    """Every worker tells of every evaluation before it goes on, so none comes early."""

    def __init__(self, path: Path) -> None:
        """Raises StorageFailed."""
        self._lines = JsonLines(path, "evaluations-torn")
        #: The newest evaluation.
        self.last = next(iter(self._lines.recover(partial(decode, EvaluationRecord), 1)), None)

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
        }
        self._lines.add(msgspec.json.encode(values))
        self.last = record
        return True

    def write(self) -> None:
        """Put all that was taken on disk. Raises StorageFailed; then nothing of it is."""
        self._lines.write()


def perplexity(loss: float | None) -> float | None:
    """None: not finite."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None

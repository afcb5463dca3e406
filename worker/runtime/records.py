"""Records that the master may lack, kept by each worker for the next checkpoint.

Without them such records exist only in the memory of agents, and are lost if all nodes end before
the master is back. A line of the file is a step's record or an evaluation's. Must not know when a
checkpoint is taken or restored.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from oobleck.core.checkpoint import (
    MOST_RECORDS,
    MOST_RECORDS_BYTES,
    RECORDS,
    InvalidCheckpoint,
    RecordsFile,
)
from oobleck.core.codec import decode, encode
from oobleck.core.messages import EvaluationRecord, StepRecord


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Line of the file: the record of a step, or of an evaluation."""

    step: StepRecord | None = None
    evaluation: EvaluationRecord | None = None


@dataclass(frozen=True, slots=True)
class Records:
    """Records that were beside a checkpoint, ordered by step."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()


_NOTHING = Records()


class RecordLog:
    """Records of one worker that the master has not acknowledged; the oldest if there are
    too many.
    """

    def __init__(self, most: int = MOST_RECORDS, most_bytes: int = MOST_RECORDS_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        #: Lines by step, in this order.
        self._steps: dict[int, bytes] = {}
        self._evaluations: dict[int, bytes] = {}
        self._bytes = 0
        #: Newest step whose record was added, kept or not.
        self._through = 0
        #: Steps and evaluations up to these are on the master's disk.
        self._acknowledged = self._evaluated = 0
        #: Guards all of the above: the training thread adds, others acknowledge and write.
        self._changed = threading.Condition()

    def add(self, record: StepRecord) -> None:
        """Keep the record of the step that was just committed."""
        with self._changed:
            if record.step > self._acknowledged:
                self._keep(self._steps, record.step, Line(step=record))
            self._through = max(self._through, record.step)
            self._changed.notify_all()

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Keep the record of an evaluation."""
        with self._changed:
            if record.step > self._evaluated:
                self._keep(self._evaluations, record.step, Line(evaluation=record))

    def acknowledge(self, step: int, evaluation: int) -> None:
        """Forget records that the master has on its disk. Callable from any thread."""
        with self._changed:
            self._acknowledged, self._evaluated = step, evaluation
            self._forget(self._steps, [known for known in self._steps if known <= step])
            known = [known for known in self._evaluations if known <= evaluation]
            self._forget(self._evaluations, known)

    def go_back(self, step: int, restored: Records = _NOTHING) -> None:
        """Continue from the state after `step`, with the records that were beside it."""
        with self._changed:
            for kept in (self._steps, self._evaluations):
                self._forget(kept, [known for known in kept if known > step])
            self._through = step
        for record in restored.steps:
            self.add(record)
        for evaluation in restored.evaluations:
            self.add_evaluation(evaluation)
        with self._changed:
            self._steps = dict(sorted(self._steps.items()))
            self._evaluations = dict(sorted(self._evaluations.items()))

    def lines(self, step: int, timeout_s: float) -> list[bytes]:
        """Return the lines up to `step`, once that step's own record was added; without it after
        the time-out."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while self._through < step and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            kept = (*self._steps.items(), *self._evaluations.items())
            return [line for known, line in kept if known <= step]

    def _keep(self, kept: dict[int, bytes], step: int, line: Line) -> None:
        text = encode(line) + b"\n"
        full = len(self._steps) + len(self._evaluations) >= self._most
        if step in kept or full or self._bytes + len(text) > self._most_bytes:
            return
        kept[step] = text
        self._bytes += len(text)

    def _forget(self, kept: dict[int, bytes], steps: Sequence[int]) -> None:
        for step in steps:
            self._bytes -= len(kept.pop(step))


def describe_file(lines: Sequence[bytes]) -> RecordsFile:
    """Return the manifest's entry for the file of these lines."""
    text = b"".join(lines)
    return RecordsFile(bytes=len(text), sha256=hashlib.sha256(text).hexdigest())


def read_lines(text: bytes, step: int) -> Records:
    """Return the records in the file beside the checkpoint of `step`. Raises InvalidCheckpoint."""
    steps: dict[int, StepRecord] = {}
    evaluations: dict[int, EvaluationRecord] = {}
    lines = text.splitlines()
    if len(lines) > MOST_RECORDS:
        raise InvalidCheckpoint(f"{RECORDS}: has {len(lines)} lines, more than {MOST_RECORDS}")
    for number, line in enumerate(lines, 1):
        try:
            found = decode(Line, line)
        except ValueError as error:
            raise InvalidCheckpoint(f"{RECORDS}: line {number}: {error}") from error
        one = found.step or found.evaluation
        if one is None or not 0 < one.step <= step:
            raise InvalidCheckpoint(f"{RECORDS}: line {number}: has no step up to {step}")
        if found.step is not None:
            steps.setdefault(found.step.step, found.step)
        if found.evaluation is not None:
            evaluations.setdefault(found.evaluation.step, found.evaluation)
    return Records(
        steps=tuple(record for _, record in sorted(steps.items())),
        evaluations=tuple(record for _, record in sorted(evaluations.items())),
    )

"""evaluations.jsonl: one line per evaluation, in step order, exactly once, whatever fails.

Every worker tells of every evaluation before it goes on, so that those of earlier steps are here
before those of later ones; what comes again is dropped. The file's last whole line says how far it
goes. It exists from the first evaluation on.
"""

import math
from pathlib import Path

import msgspec

from oobleck.host.ipc.messages import EvaluationRecord
from oobleck.master.storage.disk import append
from oobleck.master.storage.json_lines import recover
from oobleck.planner.codec import decode


class EvaluationLog:
    def __init__(self, path: Path) -> None:
        """Cut what is not a whole line off the end of the file, if there is one."""
        self._path = path
        self._unwritten: list[bytes] = []
        #: The newest evaluation.
        self.last = next(iter(recover(path, _read, 1)), None)

    def append(self, record: EvaluationRecord) -> bool:
        """Take `record`; returns whether it is new. `write` has it on disk."""
        if self.last is not None and record.step <= self.last.step:
            return False
        self._unwritten.append(line(record))
        self.last = record
        return True

    def write(self) -> None:
        """Put all that was taken on disk. Raises OSError; then nothing of it is."""
        if not self._unwritten:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab", buffering=0) as file:
            append(file.fileno(), b"".join(self._unwritten), torn="evaluations-torn", sync=True)
        self._unwritten.clear()


def line(record: EvaluationRecord) -> bytes:
    """The text of a record, with what follows from it."""
    values = {
        "step": record.step,
        "loss": record.loss,
        "perplexity": perplexity(record.loss),
        "samples": record.samples,
        "generation": record.generation,
        "seconds": record.seconds,
        "time": record.time,
    }
    return msgspec.json.encode(values) + b"\n"


def _read(text: bytes) -> EvaluationRecord:
    return decode(EvaluationRecord, text)


def perplexity(loss: float | None) -> float | None:
    """None: not finite."""
    try:
        return None if loss is None else math.exp(loss)
    except OverflowError:
        return None

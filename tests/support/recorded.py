"""What a worker has recorded of its steps."""

from oobleck.core.ids import Generation
from oobleck.core.messages import EvaluationRecord
from oobleck.worker.runtime.records import RecordLog
from support.scenario import record


def recorded(step: int) -> RecordLog:
    """Return the log of a worker that has committed `step` steps."""
    log = RecordLog()
    for number in range(1, step + 1):
        log.add(record(number, 1, float(number)))
    return log


def evaluation(step: int) -> EvaluationRecord:
    """Return the record of an evaluation after `step`."""
    return EvaluationRecord(
        step=step, loss=1.5, samples=8, generation=Generation(1), seconds=0.1, time=float(step)
    )

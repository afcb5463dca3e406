"""What committed steps leave behind, as messages and back: records and lines of output."""

from collections.abc import Sequence

from oobleck.host.ipc.messages import EvaluationRecord, StepRecord
from oobleck.planner.ids import Generation, JobId
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import at_least, in_field, read_job_id, read_slot


def record_message(record: StepRecord) -> pb.StepRecord:
    return pb.StepRecord(
        step=record.step,
        loss=record.loss,
        grad_norm=record.grad_norm,
        tokens=record.tokens,
        samples_digest=record.samples_digest,
        generation=record.generation,
        step_seconds=record.step_seconds,
        time=record.time,
        skipped=record.skipped,
    )


def read_record(message: pb.StepRecord) -> StepRecord:
    with in_field("record"):
        return StepRecord(
            step=at_least(message.step, 1, "step"),
            loss=message.loss if message.HasField("loss") else None,
            grad_norm=message.grad_norm if message.HasField("grad_norm") else None,
            tokens=message.tokens,
            samples_digest=message.samples_digest,
            generation=Generation(message.generation),
            step_seconds=message.step_seconds,
            time=message.time,
            skipped=message.skipped,
        )


def records_message(job_id: JobId, records: Sequence[StepRecord]) -> pb.StepRecords:
    return pb.StepRecords(job_id=job_id, records=[record_message(record) for record in records])


def read_records(message: pb.StepRecords) -> tuple[JobId, tuple[StepRecord, ...]]:
    with in_field("records"):
        records = tuple(read_record(record) for record in message.records)
        return read_job_id(message.job_id), records


def evaluation_message(record: EvaluationRecord) -> pb.Evaluation:
    return pb.Evaluation(
        step=record.step,
        loss=record.loss,
        samples=record.samples,
        seconds=record.seconds,
        time=record.time,
    )


def read_output(message: pb.LogLines) -> tuple[JobId, int, tuple[str, ...]]:
    """Job, slot and lines of a worker's output; a gap is told in a line of its own."""
    with in_field("log"):
        lines = tuple(message.lines)
        if message.dropped:
            lines = (f"[{message.dropped} lines were dropped here: too many at once]", *lines)
        return read_job_id(message.job_id), read_slot(message.slot), lines

"""What agents send in a running session, and the events that it becomes."""

import msgspec

from oobleck.host.ipc.messages import (
    CheckpointSaved,
    Evaluated,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.master.events.reports import (
    EvaluationReceived,
    MeasurementReported,
    Observed,
    PeerLostReported,
    PhaseReported,
    SaveReported,
    WorkerExitReported,
    WorkerFailedReported,
    WorkerHungReported,
)
from oobleck.planner.ids import JobId, WorkerId
from oobleck.proto.types import Hung, NodeStatus, WorkerExited, WorkerReport


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """Step records as an agent hands them over, in any order and again and again."""

    job_id: JobId
    records: tuple[StepRecord, ...]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one worker's output."""

    job_id: JobId
    slot: int
    lines: tuple[str, ...]


Incoming = NodeStatus | WorkerReport | Records | Output


def event_of(worker: WorkerId, report: WorkerReport) -> Observed:
    """What a report tells; evaluations, which come from all workers, go to the disk first."""
    job_id = report.job_id
    match report.what:
        case WorkerExited() as exited:
            return WorkerExitReported(
                worker=worker, job_id=job_id, incarnation=report.incarnation, exited=exited
            )
        case Hung() as hung:
            return WorkerHungReported(
                worker=worker, job_id=job_id, incarnation=report.incarnation, hung=hung
            )
        case PhaseReached() as phase:
            return PhaseReported(
                worker=worker, job_id=job_id, incarnation=report.incarnation, phase=phase
            )
        case PeerLost() as lost:
            return PeerLostReported(
                worker=worker, job_id=job_id, incarnation=report.incarnation, lost=lost
            )
        case Failed() as failed:
            return WorkerFailedReported(
                worker=worker,
                job_id=job_id,
                incarnation=report.incarnation,
                kind=failed.kind,
                message=failed.message,
            )
        case Measured() | LinkMeasured() as measured:
            return MeasurementReported(
                worker=worker, job_id=job_id, incarnation=report.incarnation, measured=measured
            )
        case CheckpointSaved() | SaveFailed() | Restored() as what:
            return SaveReported(
                worker=worker, job_id=job_id, incarnation=report.incarnation, what=what
            )
        case Evaluated(record=record):
            return EvaluationReceived(job_id=job_id, record=record)

"""What happens to workers, as messages and back."""

from typing import Literal

from oobleck.host.ipc.messages import (
    CheckpointSaved,
    Evaluated,
    EvaluationRecord,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
)
from oobleck.planner.codec import decode, encode
from oobleck.planner.ids import Generation
from oobleck.planner.profile.measurement import LinkMeasurement, Measurement
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import (
    at_least,
    in_field,
    read_incarnation,
    read_job_id,
    read_scope,
    read_slot,
    shortened,
)
from oobleck.proto.plans import read_worker, worker_message
from oobleck.proto.types import Happening, Hung, WorkerExited, WorkerReport


def report_message(report: WorkerReport) -> pb.WorkerReport:
    message = pb.WorkerReport(
        job_id=report.job_id,
        slot=report.slot,
        incarnation=report.incarnation,
        generation=report.generation,
    )
    match report.what:
        case WorkerExited() as exited:
            message.exited.CopyFrom(
                pb.WorkerExited(
                    pid=exited.pid,
                    exit_code=exited.exit_code or 0,
                    signal=exited.signal or 0,
                    log_tail=shortened(exited.log_tail),
                    out_of_memory=exited.out_of_memory,
                )
            )
        case Hung(reason=reason, seconds=seconds):
            message.hung.CopyFrom(pb.Hung(reason=shortened(reason), seconds=seconds))
        case PhaseReached() as reached:
            message.phase.CopyFrom(
                pb.PhaseReached(
                    phase=reached.phase,
                    committed_step=reached.committed_step,
                    rolled_forward=reached.rolled_forward,
                    redo=reached.redo,
                    salvaged_microbatches=reached.salvaged_microbatches,
                    received_bytes=reached.received_bytes,
                )
            )
        case PeerLost() as lost:
            message.peer_lost.CopyFrom(
                pb.PeerLost(
                    step=lost.step,
                    detail=shortened(lost.detail),
                    unreached=map(worker_message, lost.unreached),
                    store_unreached=lost.store_unreached,
                )
            )
        case Failed() as failed:
            message.failed.CopyFrom(
                pb.WorkerFailed(kind=failed.kind, message=shortened(failed.message))
            )
        case Measured() as measured:
            message.measured.CopyFrom(
                pb.Measured(
                    attempt=measured.attempt,
                    measurement=encode(measured.measurement).decode()
                    if measured.measurement
                    else "",
                    problem=shortened(measured.problem),
                )
            )
        case LinkMeasured() as measured:
            message.link_measured.CopyFrom(_link_message(measured))
        case CheckpointSaved() as saved:
            message.checkpoint_saved.CopyFrom(
                pb.CheckpointSaved(
                    step=saved.step,
                    path=saved.path,
                    bytes=saved.bytes,
                    seconds=saved.seconds,
                    request=saved.request,
                )
            )
        case SaveFailed() as unsaved:
            message.save_failed.CopyFrom(
                pb.SaveFailed(
                    what=unsaved.what,
                    step=unsaved.step,
                    reason=shortened(unsaved.reason),
                    request=unsaved.request,
                )
            )
        case Restored() as restored:
            message.restored.CopyFrom(
                pb.Restored(
                    step=restored.step,
                    path=restored.path,
                    passed_over=[shortened(why) for why in restored.passed_over],
                )
            )
        case Evaluated(record=record):
            message.evaluated.CopyFrom(evaluation_message(record))
    return message


def evaluation_message(record: EvaluationRecord) -> pb.Evaluation:
    return pb.Evaluation(
        step=record.step,
        loss=record.loss,
        samples=record.samples,
        seconds=record.seconds,
        time=record.time,
    )


def _link_message(measured: LinkMeasured) -> pb.LinkMeasured:
    message = pb.LinkMeasured(
        attempt=measured.attempt, scope=measured.scope, problem=shortened(measured.problem)
    )
    if measured.link is not None:
        message.latency_s = measured.link.latency_s
        message.bytes_per_s = measured.link.bytes_per_s
    return message


def _read_measured(message: pb.Measured) -> Measured:
    with in_field("measured"):
        text = message.measurement
        return Measured(
            attempt=message.attempt,
            measurement=decode(Measurement, text) if text else None,
            problem=message.problem,
        )


def _read_link(message: pb.LinkMeasured) -> LinkMeasured:
    with in_field("link_measured"):
        scope = read_scope(message.scope)
        link = None
        if message.bytes_per_s > 0:
            link = LinkMeasurement(
                scope=scope, latency_s=message.latency_s, bytes_per_s=message.bytes_per_s
            )
        return LinkMeasured(
            attempt=message.attempt, scope=scope, link=link, problem=message.problem
        )


def _read_phase(text: str) -> Literal["aborted", "joined", "transferred"]:
    match text:
        case "aborted" | "joined" | "transferred":
            return text
        case _:
            raise ValueError(f"phase: {text!r} is not aborted, joined or transferred")


def _read_kind(text: str) -> Literal["user", "node", "internal"]:
    match text:
        case "user" | "node" | "internal":
            return text
        case _:
            raise ValueError(f"failed.kind: {text!r} is not user or internal")


def _read_saved_thing(text: str) -> Literal["checkpoint", "output"]:
    match text:
        case "checkpoint" | "output":
            return text
        case _:
            raise ValueError(f"save_failed.what: {text!r} is not checkpoint or output")


def _read_what(message: pb.WorkerReport) -> Happening:
    generation = Generation(message.generation)
    match message.WhichOneof("what"):
        case "exited":
            exited = message.exited
            return WorkerExited(
                pid=exited.pid,
                exit_code=None if exited.signal else exited.exit_code,
                signal=exited.signal or None,
                log_tail=exited.log_tail,
                out_of_memory=exited.out_of_memory,
            )
        case "hung":
            return Hung(reason=message.hung.reason, seconds=message.hung.seconds)
        case "phase":
            reached = message.phase
            committed = reached.committed_step if reached.HasField("committed_step") else None
            return PhaseReached(
                generation=generation,
                phase=_read_phase(reached.phase),
                committed_step=committed,
                rolled_forward=reached.rolled_forward,
                redo=reached.redo,
                salvaged_microbatches=reached.salvaged_microbatches,
                received_bytes=reached.received_bytes,
            )
        case "peer_lost":
            lost = message.peer_lost
            return PeerLost(
                generation=generation,
                step=lost.step,
                detail=lost.detail,
                unreached=tuple(map(read_worker, lost.unreached)),
                store_unreached=lost.store_unreached,
            )
        case "failed":
            return Failed(kind=_read_kind(message.failed.kind), message=message.failed.message)
        case "measured":
            return _read_measured(message.measured)
        case "link_measured":
            return _read_link(message.link_measured)
        case "checkpoint_saved":
            saved = message.checkpoint_saved
            return CheckpointSaved(
                step=saved.step,
                path=saved.path,
                bytes=saved.bytes,
                seconds=saved.seconds,
                request=saved.request,
            )
        case "save_failed":
            failed = message.save_failed
            return SaveFailed(
                what=_read_saved_thing(failed.what),
                step=failed.step,
                reason=failed.reason,
                request=failed.request,
            )
        case "restored":
            restored = message.restored
            return Restored(
                generation=generation,
                step=restored.step,
                path=restored.path,
                passed_over=tuple(restored.passed_over),
            )
        case "evaluated":
            return Evaluated(record=_read_evaluation(message.evaluated, generation))
        case _:
            raise ValueError("what: is missing")


def _read_evaluation(message: pb.Evaluation, generation: Generation) -> EvaluationRecord:
    with in_field("evaluated"):
        return EvaluationRecord(
            step=at_least(message.step, 1, "step"),
            loss=message.loss if message.HasField("loss") else None,
            samples=message.samples,
            generation=generation,
            seconds=message.seconds,
            time=message.time,
        )


def read_report(message: pb.WorkerReport) -> WorkerReport:
    with in_field("report"):
        return WorkerReport(
            job_id=read_job_id(message.job_id),
            slot=read_slot(message.slot),
            incarnation=read_incarnation(message.incarnation),
            generation=Generation(message.generation),
            what=_read_what(message),
        )

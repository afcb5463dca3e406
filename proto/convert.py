"""The one place between protobuf messages and domain types.

`read_x(message)` gives the domain value and raises ValueError with the field's name where the
message is malformed; `x_message(value)` gives the message. Must not know who is talking.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast, get_args

from google.protobuf.message import DecodeError

from oobleck.host.messages import (
    CheckpointSaved,
    Evaluated,
    EvaluationRecord,
    Failed,
    LinkMeasured,
    Measure,
    Measured,
    Meeting,
    PeerLost,
    PhaseReached,
    Rendezvous,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.planner.codec import decode, encode
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName, WorkerId, check_name
from oobleck.planner.measurement import LinkMeasurement, Measurement, Scope
from oobleck.planner.plan import Pipeline, Plan, Schedule, Stage
from oobleck.proto import control_pb2 as pb
from oobleck.proto.types import (
    Assignment,
    Happening,
    Hung,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerExited,
    WorkerReport,
    WorkerStatus,
)

_INCARNATION = re.compile(r"[0-9a-f]{4,64}")
_ADDRESS = re.compile(r"\S+:[0-9]{1,5}")
_MOST_SLOTS = 1024


@contextmanager
def _field(name: str) -> Iterator[None]:
    """Names the field in a ValueError from inside."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _one_of(value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
    return value


def _at_least(value: int, minimum: int, field: str) -> int:
    if value < minimum:
        raise ValueError(f"{field}: {value} is below {minimum}")
    return value


def _span(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"seconds: {seconds} is no span of time")
    return seconds


def read_incarnation(text: str) -> Incarnation:
    if _INCARNATION.fullmatch(text) is None:
        raise ValueError(f"incarnation: {text[:80]!r} is not 4 to 64 lower-case hex digits")
    return Incarnation(text)


def _read_job_id(text: str) -> JobId:
    with _field("job_id"):
        return JobId(check_name(text, "job"))


# ---- plan


def worker_message(worker: WorkerId) -> pb.WorkerId:
    return pb.WorkerId(node=worker.node, slot=worker.slot)


def read_worker(message: pb.WorkerId) -> WorkerId:
    return WorkerId(NodeName(check_name(message.node, "node")), message.slot)


def plan_message(plan: Plan) -> pb.Plan:
    return pb.Plan(
        generation=plan.generation,
        pipelines=[
            pb.Pipeline(
                nodes=list(pipeline.nodes),
                stages=[
                    pb.Stage(
                        first_layer=stage.first_layer,
                        last_layer=stage.last_layer,
                        workers=[worker_message(worker) for worker in stage.workers],
                        resident=stage.resident,
                    )
                    for stage in pipeline.stages
                ],
                first_microbatch=pipeline.first_microbatch,
                microbatches=pipeline.microbatches,
            )
            for pipeline in plan.pipelines
        ],
        schedule=plan.schedule,
    )


def _read_stage(message: pb.Stage) -> Stage:
    if not message.workers:
        raise ValueError("workers: a stage needs at least one")
    if message.last_layer < message.first_layer:
        raise ValueError(f"last_layer: {message.last_layer} is below {message.first_layer}")
    return Stage(
        first_layer=message.first_layer,
        last_layer=message.last_layer,
        workers=tuple(read_worker(worker) for worker in message.workers),
        resident=message.resident,
    )


def _read_pipeline(message: pb.Pipeline) -> Pipeline:
    if not message.stages:
        raise ValueError("stages: a pipeline needs at least one")
    return Pipeline(
        nodes=tuple(NodeName(check_name(node, "node")) for node in message.nodes),
        stages=tuple(_read_stage(stage) for stage in message.stages),
        first_microbatch=message.first_microbatch,
        microbatches=message.microbatches,
    )


def _read_schedule(text: str) -> Schedule:
    for schedule in get_args(Schedule):
        if text == schedule:
            return cast(Schedule, schedule)
    raise ValueError(f"schedule: {text!r} is not one of {', '.join(get_args(Schedule))}")


def read_plan(message: pb.Plan) -> Plan:
    with _field("plan"):
        if not message.pipelines:
            raise ValueError("pipelines: a plan needs at least one")
        return Plan(
            generation=Generation(_at_least(message.generation, 1, "generation")),
            pipelines=tuple(_read_pipeline(pipeline) for pipeline in message.pipelines),
            schedule=_read_schedule(message.schedule),
        )


def read_serialised_plan(serialised: bytes) -> Plan:
    with _field("plan"):
        try:
            message = pb.Plan.FromString(serialised)
        except DecodeError as error:
            raise ValueError("is no serialised Plan") from error
    return read_plan(message)


def rendezvous_message(rendezvous: Rendezvous) -> pb.Rendezvous:
    return pb.Rendezvous(store=rendezvous.store, prefix=rendezvous.prefix)


def read_rendezvous(message: pb.Rendezvous) -> Rendezvous:
    with _field("rendezvous"):
        if not message.prefix:
            raise ValueError("prefix: is empty")
        return Rendezvous(store=_read_address(message.store, "store"), prefix=message.prefix)


def _read_address(text: str, field: str) -> str:
    if _ADDRESS.fullmatch(text) is None:
        raise ValueError(f"{field}: {text!r} is not HOST:PORT")
    return text


# ---- up: register and status


def status_message(status: NodeStatus) -> pb.NodeStatus:
    return pb.NodeStatus(
        job_id=status.job_id or "",
        generation=status.generation,
        workers=[worker_status_message(worker) for worker in status.workers],
        leaving=status.leaving,
        trouble=status.trouble,
        failed_starts=status.failed_starts,
    )


def worker_status_message(worker: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        slot=worker.slot,
        incarnation=worker.incarnation,
        pid=worker.pid,
        store=worker.store,
        data=worker.data,
        generation=worker.generation,
        committed_step=worker.committed_step,
        finished=worker.finished,
        peak_memory_bytes=worker.peak_memory_bytes,
        base_memory_bytes=worker.base_memory_bytes,
        beats=worker.beats,
        doing=worker.doing,
        waiting=worker.waiting,
    )


def _read_worker_status(message: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        slot=message.slot,
        incarnation=read_incarnation(message.incarnation),
        pid=message.pid,
        store=_read_address(message.store, "store") if message.store else "",
        data=message.data,
        generation=Generation(message.generation),
        committed_step=_at_least(message.committed_step, -1, "committed_step"),
        finished=message.finished,
        peak_memory_bytes=message.peak_memory_bytes,
        base_memory_bytes=message.base_memory_bytes,
        beats=message.beats,
        doing=message.doing,
        waiting=message.waiting,
    )


def read_status(message: pb.NodeStatus) -> NodeStatus:
    with _field("status"):
        workers = tuple(
            sorted((_read_worker_status(w) for w in message.workers), key=lambda w: w.slot)
        )
        if len({worker.slot for worker in workers}) != len(workers):
            raise ValueError("workers: a slot stands twice")
        return NodeStatus(
            job_id=_read_job_id(message.job_id) if message.job_id else None,
            generation=Generation(message.generation),
            workers=workers,
            leaving=message.leaving,
            trouble=message.trouble,
            failed_starts=message.failed_starts,
        )


def register_message(registration: Registration) -> pb.Register:
    facts = registration.facts
    return pb.Register(
        protocol=registration.protocol,
        node=facts.node,
        hostname=facts.hostname,
        address=facts.address,
        pid=facts.pid,
        worker_slots=facts.worker_slots,
        device=facts.device,
        memory_per_worker_bytes=facts.memory_per_worker_bytes,
        device_kind=facts.device_kind,
        status=status_message(registration.status),
    )


def read_register(message: pb.Register, incarnation: str) -> Registration:
    """`incarnation`: of the envelope, an AgentMessage."""
    with _field("register"):
        if not message.address:
            raise ValueError("address: is empty; give an address that other nodes can reach")
        if not 1 <= message.worker_slots <= _MOST_SLOTS:
            raise ValueError(f"worker_slots: {message.worker_slots} is not in 1..{_MOST_SLOTS}")
        facts = NodeFacts(
            node=NodeName(check_name(message.node, "node")),
            incarnation=read_incarnation(incarnation),
            hostname=message.hostname,
            address=message.address,
            pid=message.pid,
            worker_slots=message.worker_slots,
            device=_one_of(message.device, ("cpu", "cuda")),
            memory_per_worker_bytes=_at_least(
                message.memory_per_worker_bytes, 1, "memory_per_worker_bytes"
            ),
            device_kind=message.device_kind,
        )
        return Registration(
            protocol=message.protocol, facts=facts, status=read_status(message.status)
        )


# ---- up: reports and records


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
                    log_tail=exited.log_tail,
                )
            )
        case Hung(reason=reason, seconds=seconds):
            message.hung.CopyFrom(pb.Hung(reason=reason, seconds=seconds))
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
            message.peer_lost.CopyFrom(pb.PeerLost(step=lost.step, detail=lost.detail))
        case Failed() as failed:
            message.failed.CopyFrom(pb.WorkerFailed(kind=failed.kind, message=failed.message))
        case Measured() as measured:
            message.measured.CopyFrom(
                pb.Measured(
                    attempt=measured.attempt,
                    measurement=encode(measured.measurement).decode()
                    if measured.measurement
                    else "",
                    problem=measured.problem,
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
                    reason=unsaved.reason,
                    request=unsaved.request,
                )
            )
        case Restored() as restored:
            message.restored.CopyFrom(
                pb.Restored(
                    step=restored.step,
                    path=restored.path,
                    passed_over=list(restored.passed_over),
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
        attempt=measured.attempt, scope=measured.scope, problem=measured.problem
    )
    if measured.link is not None:
        message.latency_s = measured.link.latency_s
        message.bytes_per_s = measured.link.bytes_per_s
    return message


def _read_scope(text: str) -> Scope:
    match text:
        case "intra_node" | "inter_node":
            return text
        case _:
            raise ValueError(f"scope: {text!r} is not intra_node or inter_node")


def _read_measured(message: pb.Measured) -> Measured:
    with _field("measured"):
        text = message.measurement
        return Measured(
            attempt=message.attempt,
            measurement=decode(Measurement, text) if text else None,
            problem=message.problem,
        )


def _read_link(message: pb.LinkMeasured) -> LinkMeasured:
    with _field("link_measured"):
        scope = _read_scope(message.scope)
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
            )
        case "hung":
            return Hung(reason=message.hung.reason, seconds=_span(message.hung.seconds))
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
            return PeerLost(generation=generation, step=lost.step, detail=lost.detail)
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
    with _field("evaluated"):
        return EvaluationRecord(
            step=_at_least(message.step, 1, "step"),
            loss=message.loss if message.HasField("loss") else None,
            samples=message.samples,
            generation=generation,
            seconds=message.seconds,
            time=message.time,
        )


def read_report(message: pb.WorkerReport) -> WorkerReport:
    with _field("report"):
        return WorkerReport(
            job_id=_read_job_id(message.job_id),
            slot=message.slot,
            incarnation=read_incarnation(message.incarnation),
            generation=Generation(message.generation),
            what=_read_what(message),
        )


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
    with _field("record"):
        return StepRecord(
            step=_at_least(message.step, 1, "step"),
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
    with _field("records"):
        records = tuple(read_record(record) for record in message.records)
        return _read_job_id(message.job_id), records


def read_output(message: pb.LogLines) -> tuple[JobId, int, tuple[str, ...]]:
    """Job, slot and lines of a worker's output; a gap is told in a line of its own."""
    with _field("log"):
        lines = tuple(message.lines)
        if message.dropped:
            lines = (f"[{message.dropped} lines were dropped here: too many at once]", *lines)
        return _read_job_id(message.job_id), message.slot, lines


# ---- down


def assignment_message(assignment: Assignment, plan: bytes) -> pb.Assignment:
    """`plan`: the assignment's plan, serialised; empty where it has none."""
    message = pb.Assignment(
        version=assignment.version,
        job_id=assignment.job_id or "",
        job=assignment.job,
        plan=plan,
        boundary=assignment.boundary,
        worker_incarnations=list(assignment.worker_incarnations),
        restore=assignment.restore,
        save=assignment.save,
        leaving=[worker_message(worker) for worker in assignment.leaving],
        handover=assignment.handover,
        drained=assignment.drained,
    )
    if assignment.rendezvous is not None:
        message.rendezvous.CopyFrom(rendezvous_message(assignment.rendezvous))
    if assignment.measure is not None:
        message.measure.CopyFrom(measure_message(assignment.measure))
    return message


def measure_message(wish: Measure) -> pb.Measure:
    return pb.Measure(
        attempt=wish.attempt,
        meetings=[
            pb.Meeting(
                scope=meeting.scope,
                first=worker_message(meeting.workers[0]),
                second=worker_message(meeting.workers[1]),
                rendezvous=rendezvous_message(meeting.rendezvous),
            )
            for meeting in wish.meetings
        ],
        gpus=wish.gpus,
    )


def read_measure(message: pb.Measure) -> Measure:
    with _field("measure"):
        return Measure(
            attempt=_at_least(message.attempt, 1, "attempt"),
            meetings=tuple(
                Meeting(
                    scope=_read_scope(meeting.scope),
                    workers=(read_worker(meeting.first), read_worker(meeting.second)),
                    rendezvous=read_rendezvous(meeting.rendezvous),
                )
                for meeting in message.meetings
            ),
            gpus=_at_least(message.gpus, 1, "gpus"),
        )


def read_assignment(message: pb.Assignment) -> Assignment:
    with _field("assignment"):
        has_plan = bool(message.plan)
        if has_plan != message.HasField("rendezvous"):
            raise ValueError("plan and rendezvous come together or not at all")
        return Assignment(
            version=message.version,
            job_id=_read_job_id(message.job_id) if message.job_id else None,
            job=message.job,
            plan=read_serialised_plan(message.plan) if has_plan else None,
            rendezvous=read_rendezvous(message.rendezvous) if has_plan else None,
            boundary=message.boundary,
            worker_incarnations=tuple(
                read_incarnation(incarnation) for incarnation in message.worker_incarnations
            ),
            measure=read_measure(message.measure) if message.HasField("measure") else None,
            restore=message.restore,
            save=message.save,
            leaving=tuple(read_worker(worker) for worker in message.leaving),
            handover=message.handover,
            drained=message.drained,
        )

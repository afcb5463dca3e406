"""What a node is to do, as messages and back."""

from oobleck.host.ipc.messages import Measure, Meeting
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import at_least, in_field, read_incarnation, read_job_id, read_scope
from oobleck.proto.plans import (
    read_rendezvous,
    read_serialised_plan,
    read_worker,
    rendezvous_message,
    worker_message,
)
from oobleck.proto.types import Assignment


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
        anew=assignment.anew,
        save=assignment.save,
        leaving=[worker_message(worker) for worker in assignment.leaving],
        handover=assignment.handover,
        drained=assignment.drained,
        data=assignment.data,
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
    with in_field("measure"):
        return Measure(
            attempt=at_least(message.attempt, 1, "attempt"),
            meetings=tuple(
                Meeting(
                    scope=read_scope(meeting.scope),
                    workers=(read_worker(meeting.first), read_worker(meeting.second)),
                    rendezvous=read_rendezvous(meeting.rendezvous),
                )
                for meeting in message.meetings
            ),
            gpus=at_least(message.gpus, 1, "gpus"),
        )


def read_assignment(message: pb.Assignment) -> Assignment:
    with in_field("assignment"):
        has_plan = bool(message.plan)
        if has_plan != message.HasField("rendezvous"):
            raise ValueError("plan and rendezvous come together or not at all")
        return Assignment(
            version=message.version,
            job_id=read_job_id(message.job_id) if message.job_id else None,
            job=message.job,
            plan=read_serialised_plan(message.plan) if has_plan else None,
            rendezvous=read_rendezvous(message.rendezvous) if has_plan else None,
            boundary=message.boundary,
            worker_incarnations=tuple(
                read_incarnation(incarnation) for incarnation in message.worker_incarnations
            ),
            measure=read_measure(message.measure) if message.HasField("measure") else None,
            restore=message.restore,
            anew=message.anew,
            save=message.save,
            leaving=tuple(read_worker(worker) for worker in message.leaving),
            handover=message.handover,
            drained=message.drained,
            data=message.data,
        )

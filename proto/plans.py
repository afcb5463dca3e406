"""Plans and the places where their workers meet, as messages and back."""

from functools import lru_cache
from typing import cast, get_args

from google.protobuf.message import DecodeError

from oobleck.host.ipc.messages import Rendezvous
from oobleck.planner.ids import Generation, NodeName, WorkerId, check_name
from oobleck.planner.programs.plan import Pipeline, Plan, Stage
from oobleck.planner.schedules import Schedule
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import check_bounds
from oobleck.proto.checks import at_least, in_field, read_address, read_slot


def worker_message(worker: WorkerId) -> pb.WorkerId:
    return pb.WorkerId(node=worker.node, slot=worker.slot)


def read_worker(message: pb.WorkerId) -> WorkerId:
    return WorkerId(NodeName(check_name(message.node, "node")), read_slot(message.slot))


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
    with in_field("plan"):
        if not message.pipelines:
            raise ValueError("pipelines: a plan needs at least one")
        return Plan(
            generation=Generation(at_least(message.generation, 1, "generation")),
            pipelines=tuple(_read_pipeline(pipeline) for pipeline in message.pipelines),
            schedule=_read_schedule(message.schedule),
        )


@lru_cache(maxsize=4)  # every node is told the same, and tells the same
def read_serialised_plan(serialised: bytes) -> Plan:
    with in_field("plan"):
        try:
            message = pb.Plan.FromString(serialised)
        except DecodeError as error:
            raise ValueError("is no serialised Plan") from error
        check_bounds(message)
    return read_plan(message)


@lru_cache(maxsize=4)
def serialise_plan(plan: Plan) -> bytes:
    """Read by `read_serialised_plan`. That of many nodes takes milliseconds and is told often."""
    return plan_message(plan).SerializeToString()


def rendezvous_message(rendezvous: Rendezvous) -> pb.Rendezvous:
    return pb.Rendezvous(store=rendezvous.store, prefix=rendezvous.prefix)


def read_rendezvous(message: pb.Rendezvous) -> Rendezvous:
    with in_field("rendezvous"):
        if not message.prefix:
            raise ValueError("prefix: is empty")
        return Rendezvous(store=read_address(message.store, "store"), prefix=message.prefix)

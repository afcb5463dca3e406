"""Conversion of plans to messages, as operators see them."""

from functools import lru_cache

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan, is_of_pipelines
from oobleck.core.routes import Hold, Hop
from oobleck.core.units import runs
from oobleck.proto import control_pb2 as pb


def worker_message(worker: WorkerId) -> pb.WorkerId:
    return pb.WorkerId(node=worker.node, slot=worker.slot)


def _stage_message(of: Hop | Hold) -> pb.Stage:
    return pb.Stage(
        first_layer=of.first_layer,
        last_layer=of.last_layer,
        workers=[worker_message(worker) for worker in of.workers],
        resident=isinstance(of, Hold) and of.resident,
    )


@lru_cache(maxsize=4)
def plan_message(plan: Plan) -> pb.Plan:
    """Return the plan as a message, which the caller must copy: it is cached, as it takes
    milliseconds."""
    message = pb.Plan(
        generation=plan.generation,
        pipelines=[
            pb.Pipeline(
                nodes=list(pipeline.nodes),
                stages=map(_stage_message, pipeline.stages),
                first_microbatch=share.start,
                microbatches=pipeline.microbatches,
            )
            for pipeline, share in zip(plan.pipelines, plan.shares, strict=True)
        ],
        schedule=plan.schedule,
    )
    if not is_of_pipelines(plan):
        message.routes.extend(
            pb.Route(
                hops=map(_stage_message, route.hops),
                first_microbatch=share.start,
                microbatches=route.microbatches,
            )
            for route, share in zip(plan.routes, plan.shares, strict=True)
        )
        message.holds.extend(map(_stage_message, plan.holds))
    message.shadows.extend(
        pb.Stage(first_layer=run[0], last_layer=run[-1], workers=[worker_message(worker)])
        for worker, layers in plan.shadows.items()
        for run in runs(layers)
    )
    return message

"""Plans as operators are told of them."""

from functools import lru_cache

from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.plan import Plan
from oobleck.proto import control_pb2 as pb


def worker_message(worker: WorkerId) -> pb.WorkerId:
    return pb.WorkerId(node=worker.node, slot=worker.slot)


@lru_cache(maxsize=4)
def plan_message(plan: Plan) -> pb.Plan:
    """To be copied: of many nodes it takes milliseconds, and it is asked for often."""
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
                first_microbatch=share.start,
                microbatches=pipeline.microbatches,
            )
            for pipeline, share in zip(plan.pipelines, plan.shares, strict=True)
        ],
        schedule=plan.schedule,
    )

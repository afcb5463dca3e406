"""Conversion of plans, as operators see them, and of the inputs of planning, to messages and
back."""

from functools import lru_cache
from typing import cast, get_args

from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.job.spec import RecoveryPolicy
from oobleck.planner.profile.file import format_profile, parse_profile
from oobleck.planner.programs.pipeline import Pipeline
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hold, Hop, Route, runs
from oobleck.planner.recovery.pipelines import is_of_pipelines
from oobleck.planner.report.planning import Planning
from oobleck.planner.schedules import Schedule
from oobleck.planner.ties import groups
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
    """Return the plan as a message, to be copied by the caller. It is cached, since it takes
    milliseconds for many nodes and is needed often."""
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


def planning_message(planning: Planning) -> pb.PlanningReply:
    same = planning.base == planning.plan
    return pb.PlanningReply(
        plan=plan_message(planning.plan),
        base=None if same else plan_message(planning.base),
        profile=format_profile(planning.profile),
        least_nodes=planning.sizes.start,
        most_nodes=planning.sizes.stop - 1,
        fault_tolerance=planning.fault_tolerance,
        tied=[
            pb.Layers(layers=group) for group in groups(planning.tied, planning.plan.layer_count)
        ],
        schedule_named=planning.schedule_named,
        shadows=planning.shadows,
        policy=planning.policy,
        nodes=planning.nodes,
        slow=[
            pb.WorkerRate(worker=worker_message(worker), rate=rate)
            for worker, rate in sorted(planning.rates.items())
        ],
    )


def read_planning(message: pb.PlanningReply) -> Planning:
    """Raises ValueError."""
    policy = message.policy
    if policy not in get_args(RecoveryPolicy):
        raise ValueError(f"policy: {policy!r} is of another release")
    plan = read_plan(message.plan)
    return Planning(
        plan=plan,
        base=read_plan(message.base) if message.HasField("base") else plan,
        profile=parse_profile(message.profile),
        sizes=range(message.least_nodes, message.most_nodes + 1),
        fault_tolerance=message.fault_tolerance,
        tied=tuple(tuple(group.layers) for group in message.tied),
        schedule_named=message.schedule_named,
        shadows=message.shadows,
        policy=cast(RecoveryPolicy, policy),
        nodes=tuple(map(NodeName, message.nodes)),
        rates={_worker(one.worker): one.rate for one in message.slow},
    )


def read_plan(message: pb.Plan) -> Plan:
    """Return the plan that `plan_message` was given, without its listing and the rates of workers,
    which operators do not get. Raises ValueError."""
    if message.schedule not in get_args(Schedule):
        raise ValueError(f"schedule: {message.schedule!r} is of another release")
    schedule, generation = cast(Schedule, message.schedule), Generation(message.generation)
    if not message.routes:
        pipelines = (
            Pipeline(
                nodes=tuple(map(NodeName, one.nodes)),
                stages=tuple(map(_hold, one.stages)),
                microbatches=one.microbatches,
            )
            for one in message.pipelines
        )
        return Plan.of_pipelines(pipelines, generation=generation, schedule=schedule)
    return Plan(
        generation=generation,
        holds=tuple(map(_hold, message.holds)),
        routes=tuple(
            Route(hops=tuple(map(_hop, one.hops)), microbatches=one.microbatches)
            for one in message.routes
        ),
        schedule=schedule,
    )


def _hold(message: pb.Stage) -> Hold:
    return Hold(
        first_layer=message.first_layer,
        last_layer=message.last_layer,
        workers=tuple(map(_worker, message.workers)),
        resident=message.resident,
    )


def _hop(message: pb.Stage) -> Hop:
    return Hop(
        first_layer=message.first_layer,
        last_layer=message.last_layer,
        workers=tuple(map(_worker, message.workers)),
    )


def _worker(message: pb.WorkerId) -> WorkerId:
    return WorkerId(NodeName(message.node), message.slot)

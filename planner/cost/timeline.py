"""What each stage of one pipeline computes from when to when, to be drawn.

The recurrence of times along a pipeline as it is, event by event; where only the ends count, for
many pipelines, `oobleck.planner.cost.finish` has the same faster.
"""

from collections import deque
from collections.abc import Mapping

from oobleck.planner.cost.stepcost import StageCost
from oobleck.planner.cost.steptime import cost_of, messages_s
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)
from oobleck.planner.programs.plan import Pipeline
from oobleck.planner.programs.schedule import compute_order
from oobleck.planner.schedules import Schedule

#: (what, micro-batch counted from 0, from when, to when)
Event = tuple[type[Compute], int, float, float]


def timeline(pipeline: Pipeline, profile: Profile, schedule: Schedule) -> list[list[Event]]:
    """What each stage computes from when to when; its workers run in step.

    Sends are asynchronous.
    """
    count = len(pipeline.stages)
    ways = messages_s(pipeline, profile)
    times = [_times(cost_of(pipeline, stage, profile)) for stage in range(count)]
    orders = [
        list(compute_order(schedule, stages=count, stage=stage, microbatches=pipeline.microbatches))
        for stage in range(count)
    ]
    rows: list[list[Event]] = [[] for _ in range(count)]
    # By stage and micro-batch: when the activation, or the gradient, has arrived.
    activations: list[dict[int, float]] = [{} for _ in range(count)]
    gradients: list[dict[int, float]] = [{} for _ in range(count)]
    clocks = [0.0] * count
    runnable = deque(range(count))
    while runnable:
        stage = runnable.popleft()
        row, order, clock = rows[stage], orders[stage], clocks[stage]
        while len(row) < len(order):
            kind, microbatch = order[len(row)]
            arrived: float | None = 0.0
            if kind is Forward and stage > 0:
                arrived = activations[stage].pop(microbatch, None)
            elif (kind is Backward or kind is BackwardInput) and stage < count - 1:
                arrived = gradients[stage].pop(microbatch, None)
            if arrived is None:
                break
            begun = max(clock, arrived)
            clock = begun + times[stage][kind]
            row.append((kind, microbatch, begun, clock))
            if kind is Forward and stage < count - 1:
                activations[stage + 1][microbatch] = clock + ways[stage]
                runnable.append(stage + 1)
            elif (kind is Backward or kind is BackwardInput) and stage > 0:
                gradients[stage - 1][microbatch] = clock + ways[stage - 1]
                runnable.append(stage - 1)
        clocks[stage] = clock
    return rows


def _times(cost: StageCost) -> Mapping[type[Compute], float]:
    return {
        Forward: cost.forward_s,
        Backward: cost.backward_s,
        BackwardInput: cost.backward_input_s,
        BackwardWeight: cost.backward_weight_s,
    }

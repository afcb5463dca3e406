"""Equal pipelines in slots, with free links: what a step takes by the closed forms.

A slot is what one stage's forward takes, its input gradient, or its weight gradient.
"""

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.instructions import BackwardWeight, Forward
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold, Hop, HopTicks
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler.schedule import compute_order, splits_backward


def equal_pipelines(pipelines: int, stages: int, microbatches: int) -> Plan:
    made = []
    for pipeline in range(pipelines):
        nodes = tuple(NodeName(f"p{pipeline}s{stage}") for stage in range(stages))
        holds = tuple(
            Hold(first_layer=stage, last_layer=stage, workers=(WorkerId(node, 0),))
            for stage, node in enumerate(nodes)
        )
        made.append(Pipeline(nodes=nodes, stages=holds, microbatches=microbatches))
    return Plan.of_pipelines(made, generation=Generation(1))


def slot(hop: Hop) -> HopTicks:
    return HopTicks(
        forward=1, backward_input=1, backward_weight=1, message=0, kept_bytes=1, deferred_bytes=1
    )


def ticks_of(schedule: Schedule, *, stages: int, microbatches: int, slot: int = 1) -> int:
    """Return the ticks of a step of one pipeline, in which each stage keeps its order. `slot`:
    ticks per slot."""
    orders = [
        list(compute_order(schedule, stages=stages, stage=stage, microbatches=microbatches))
        for stage in range(stages)
    ]
    clocks, done = [0] * stages, [0] * stages
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    while any(done[stage] < len(orders[stage]) for stage in range(stages)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                kind, m = order[done[stage]]
                arrived: int | None = 0
                if kind is Forward:
                    arrived = forward.get((stage - 1, m)) if stage else 0
                elif kind is not BackwardWeight:
                    last = stage == stages - 1
                    arrived = forward.get((stage, m)) if last else backward.get((stage + 1, m))
                if arrived is None:
                    break
                whole = not (splits_backward(schedule) and stage > 0)
                slots = 2 if kind is not Forward and whole else 1
                clocks[stage] = max(clocks[stage], arrived) + slots * slot
                done[stage] += 1
                if kind is not BackwardWeight:
                    (forward if kind is Forward else backward)[stage, m] = clocks[stage]
    return max(clocks)


def no_loss(schedule: Schedule, stages: int, microbatches: int) -> int:
    return ticks_of(schedule, stages=stages, microbatches=microbatches)


def replanned(
    schedule: Schedule, pipelines: int, stages: int, microbatches: int, *, hits: int = 1
) -> float:
    """Return the slots of a step if some pipelines have one stage less, whose slots take S / (S -
    1) of the others'."""
    best = None
    for hit in range(1, microbatches + 1):
        others = -(-(pipelines * microbatches - hits * hit) // (pipelines - hits))
        found = max(
            ticks_of(schedule, stages=stages, microbatches=others, slot=stages - 1),
            ticks_of(schedule, stages=stages - 1, microbatches=hit, slot=stages),
        )
        best = found if best is None else min(best, found)
    assert best is not None
    return best / (stages - 1)


def dropped(schedule: Schedule, pipelines: int, stages: int, microbatches: int) -> float:
    return no_loss(schedule, stages, -(-pipelines * microbatches // (pipelines - 1)))


def bound(pipelines: int, stages: int, microbatches: int) -> float:
    return 3 * pipelines * stages * microbatches / (pipelines * stages - 1)

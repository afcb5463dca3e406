"""The order of compute inside a stage: 1F1B, GPipe and ZB-H1, from one place.

Pure functions of (stages, stage, microbatches); micro-batches are counted from 0 here. A schedule
says in which slot of a step a stage computes which micro-batch. In a slot a stage has one forward
or one backward at most, and each takes in the neighbour stage's output of an earlier slot. Programs
(`oobleck.planner.programs.compiler.compile`) and estimates (`oobleck.planner.cost.replay`) follow
that order. Must not know workers, messages, times or bytes.
"""

from collections.abc import Iterator
from typing import Any

from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.core.schedules import Schedule

#: Kind of compute, and its micro-batch.
Work = tuple[type[Compute], int]


def forward_slot(schedule: Schedule, microbatch: Any, after: Any, microbatches: int) -> Any:
    """Return the slot of a forward on the stage with `after` stages after it, for integers or
    arrays.

    1F1B and ZB-H1 have as many forwards ahead as stages follow, and then one between any two
    backwards. GPipe has each forward as soon as the stage before has computed it.
    """
    if schedule == "gpipe":
        return microbatch - after
    return microbatch - after - 1 + microbatch * (microbatch >= after)


def backward_slot(schedule: Schedule, microbatch: Any, after: Any, microbatches: int) -> Any:
    """Return the slot of a backward; GPipe's come after all forwards, oldest first."""
    if schedule == "gpipe":
        return microbatches + microbatch + after
    return 2 * microbatch + after


def splits_backward(schedule: Schedule) -> bool:
    """Return whether stages after the first defer weight gradients: stage s those of the last s
    micro-batches (ZB-H1; Qi et al., Zero Bubble Pipeline Parallelism, §2.1).

    The input gradients, which the stages before wait for, then come earlier, and the weight
    gradients fill the end. No stage waits for the first stage's input gradient: its backward stays
    whole.
    """
    return schedule == "zb-h1"


def in_flight(schedule: Schedule, *, stages: int, stage: int, microbatches: int) -> int:
    """Return the most micro-batches whose activations the stage keeps. ZB-H1 has stages - s in
    flight and s deferred."""
    kept = {"1f1b": stages - stage, "gpipe": microbatches, "zb-h1": stages}[schedule]
    return min(kept, microbatches)


def compute_order(
    schedule: Schedule, *, stages: int, stage: int, microbatches: int
) -> Iterator[Work]:
    """Yield the compute of stage number `stage` of `stages` in one step."""
    after = stages - 1 - stage
    slots: list[tuple[int, bool, int]] = []
    for m in range(microbatches):
        slots.append((forward_slot(schedule, m, after, microbatches), False, m))
        slots.append((backward_slot(schedule, m, after, microbatches), True, m))
    split = splits_backward(schedule) and stage > 0
    for _, backward, m in sorted(slots):
        if not backward:
            yield Forward, m
        elif not split:
            yield Backward, m
        else:
            yield BackwardInput, m
            if m >= stage:
                yield BackwardWeight, m - stage
    for m in range(max(0, microbatches - stage), microbatches) if split else ():
        yield BackwardWeight, m

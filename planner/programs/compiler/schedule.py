"""The order of compute inside a stage: 1F1B, GPipe and ZB-H1, from one place.

Pure functions of (stages, stage, microbatches); micro-batches are counted from 0 here. A schedule
says in which slot of a step a stage computes which micro-batch. In a slot a stage has one forward
or one backward at most, and each takes in what the neighbour stage had in an earlier slot. Programs
follow that order (`oobleck.planner.programs.compiler.compile`), and so do estimates
(`oobleck.planner.cost.replay`). Must not know workers, messages, times or bytes.
"""

from collections.abc import Iterator
from typing import Any

from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.core.schedules import Schedule

#: What to compute, for which micro-batch.
Work = tuple[type[Compute], int]


def forward_slot(schedule: Schedule, microbatch: Any, after: Any, microbatches: int) -> Any:
    """The slot of a forward on the stage with `after` stages after it; of whole numbers or of
    arrays of such.

    1F1B has as many forwards ahead as stages follow, and then one between any two backwards; ZB-H1
    has the same. GPipe has each as soon as the stage before has had it.
    """
    if schedule == "gpipe":
        return microbatch - after
    return microbatch - after - 1 + microbatch * (microbatch >= after)


def backward_slot(schedule: Schedule, microbatch: Any, after: Any, microbatches: int) -> Any:
    """The same of a backward. GPipe's come after all forwards, oldest first."""
    if schedule == "gpipe":
        return microbatches + microbatch + after
    return 2 * microbatch + after


def splits_backward(schedule: Schedule) -> bool:
    """Return whether stages after the first leave weight gradients for later: stage s those of the
    last s micro-batches (ZB-H1; Qi et al., Zero Bubble Pipeline Parallelism, §2.1).

    So the input gradients, which the stages before wait for, come earlier, and the weight gradients
    fill the end. On the first stage nobody waits for the input gradient: its backward stays whole.
    """
    return schedule == "zb-h1"


def in_flight(schedule: Schedule, *, stages: int, stage: int, microbatches: int) -> int:
    """Return how many micro-batches the stage keeps activations of, at most. ZB-H1 has stages - s
    in flight and s left for later."""
    kept = {"1f1b": stages - stage, "gpipe": microbatches, "zb-h1": stages}[schedule]
    return min(kept, microbatches)


def compute_order(
    schedule: Schedule, *, stages: int, stage: int, microbatches: int
) -> Iterator[Work]:
    """The compute of stage number `stage` of `stages` in one step."""
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

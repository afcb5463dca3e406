"""The order of compute inside a stage: 1F1B, GPipe and ZB-H1, from one place.

Pure functions of (stages, stage, microbatches); micro-batches are counted from 0 here. Must not
know workers, messages, times or bytes: `oobleck.planner.programs.compile` lowers the order to a
program.
"""

from collections.abc import Callable, Iterator, Mapping

from oobleck.planner.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
)
from oobleck.planner.schedules import Schedule

#: What to compute, for which micro-batch.
Work = tuple[type[Compute], int]


def compute_order(
    schedule: Schedule, *, stages: int, stage: int, microbatches: int
) -> Iterator[Work]:
    """The compute of stage number `stage` of `stages` in one step."""
    return _ORDERS[schedule](stages, stage, microbatches)


def in_flight(schedule: Schedule, *, stages: int, stage: int, microbatches: int) -> int:
    """How many micro-batches the stage keeps activations of, at most."""
    kept = {"1f1b": stages - stage, "gpipe": microbatches, "zb-h1": stages}[schedule]
    return min(kept, microbatches)


def one_forward_one_backward(stages: int, stage: int, microbatches: int) -> Iterator[Work]:
    """1F1B: as many forwards ahead as stages follow, then alternate, then the rest backward
    (Narayanan et al., PipeDream-Flush)."""
    ahead = min(stages - 1 - stage, microbatches)
    for microbatch in range(ahead):
        yield Forward, microbatch
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Forward, microbatch + ahead
        yield Backward, microbatch


def all_forward_first(stages: int, stage: int, microbatches: int) -> Iterator[Work]:
    """GPipe (Huang et al.): all forwards, then all backwards, the same on every stage.

    The oldest goes back first: a stage's next backward never waits for a later one.
    """
    for microbatch in range(microbatches):
        yield Forward, microbatch
    for microbatch in range(microbatches):
        yield Backward, microbatch


def zero_bubble(stages: int, stage: int, microbatches: int) -> Iterator[Work]:
    """ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, §2.1).

    1F1B in which stage s leaves the weight gradients of the last s micro-batches for later, so
    that the input gradients, which the stages before wait for, come earlier, and the weight
    gradients fill the end. With stages - s micro-batches in flight and s left for later, every
    stage keeps as many as 1F1B's first stage does. On the first stage nobody waits for the input
    gradient, so its backward stays in one piece.
    """
    if stage == 0:
        yield from one_forward_one_backward(stages, stage, microbatches)
        return
    for kind, microbatch in one_forward_one_backward(stages, stage, microbatches):
        if kind is Forward:
            yield Forward, microbatch
            continue
        yield BackwardInput, microbatch
        if microbatch >= stage:
            yield BackwardWeight, microbatch - stage
    for microbatch in range(max(0, microbatches - stage), microbatches):
        yield BackwardWeight, microbatch


_ORDERS: Mapping[Schedule, Callable[[int, int, int], Iterator[Work]]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": all_forward_first,
    "zb-h1": zero_bubble,
}

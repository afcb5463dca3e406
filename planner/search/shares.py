"""Shares of a batch among pipelines that minimise the slowest pipeline's time (Oobleck §4.2).

Owns the shares of given pipelines; `oobleck.planner.search.instantiate` chooses the pipelines.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from oobleck.core.errors import PlanInfeasible
from oobleck.planner.cost.stages import PipelineCost


def share_batch(costs: Sequence[PipelineCost], microbatches: int) -> tuple[int, ...]:
    """Return micro-batches per pipeline, at least one each, that minimise the slowest pipeline's
    time.

    The result equals handing out one micro-batch after the other, each to the pipeline that would
    finish it first (the first one among ties). It is found by bisection over the time. Raises
    PlanInfeasible where there are fewer micro-batches than pipelines.
    """
    if len(costs) > microbatches:
        raise PlanInfeasible(
            f"{len(costs)} pipelines need as many micro-batches, and the batch has {microbatches}; "
            "enlarge global_batch or lower microbatch"
        )
    time = _full_at(Counter(costs), microbatches)
    sure = {cost: _share(cost, time - 1, microbatches) for cost in set(costs)}
    most = {cost: _share(cost, time, microbatches) for cost in sure}
    left = microbatches - sum(sure[cost] for cost in costs)
    shares = []
    for cost in costs:
        more = min(left, most[cost] - sure[cost])
        shares.append(sure[cost] + more)
        left -= more
    return tuple(shares)


def makespan(pipelines: Mapping[PipelineCost, int], microbatches: int) -> int:
    """Return the ticks of the slowest of so many pipelines of each cost, with the best shares."""
    # Each has at least one micro-batch, however long that takes.
    return max(_full_at(pipelines, microbatches), *(cost.first for cost in pipelines))


def _share(cost: PipelineCost, time: int, microbatches: int) -> int:
    return max(1, cost.capacity(time, microbatches))


def _full_at(pipelines: Mapping[PipelineCost, int], microbatches: int) -> int:
    """Return the first tick by which the pipelines, each with at least one micro-batch, finish the
    batch.
    """

    def full(time: int) -> bool:
        done = sum(n * _share(cost, time, microbatches) for cost, n in pipelines.items())
        return done >= microbatches

    if full(0):
        return 0
    low, high = 0, max(cost.time(microbatches) for cost in pipelines)
    while high - low > 1:  # low is too early
        middle = (low + high) // 2
        if full(middle):
            high = middle
        else:
            low = middle
    return high

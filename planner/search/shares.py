"""Shares of a batch among pipelines, so that the slowest is done soonest (Oobleck §4.2).

Owns the shares of given pipelines; which pipelines there are is
`oobleck.planner.search.instantiate`'s choice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from oobleck.core.errors import PlanInfeasible
from oobleck.planner.cost.formula import PipelineCost


def share_batch(costs: Sequence[PipelineCost], microbatches: int) -> tuple[int, ...]:
    """Micro-batches per pipeline, at least one each, so that the slowest is done soonest.

    The result is that of handing out one micro-batch after the other, each to the pipeline that
    would be done with it first (of equals the one that stands first), found by bisection over the
    time. Raises PlanInfeasible where there are fewer micro-batches than pipelines.
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
    """Ticks of the slowest of so many pipelines of each cost, with the best shares."""
    # Each has a micro-batch at least, however long that takes.
    return max(_full_at(pipelines, microbatches), *(cost.first for cost in pipelines))


def _share(cost: PipelineCost, time: int, microbatches: int) -> int:
    return max(1, cost.capacity(time, microbatches))


def _full_at(pipelines: Mapping[PipelineCost, int], microbatches: int) -> int:
    """The first tick by which the pipelines, none of them idle, are done with the whole batch."""

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

"""Micro-batches of a step that is partly redone, in place of the plan's shares.

After a loss, the gradients of many micro-batches survive. The others are redone, each only as far
down as a layer lacks it. Pure data, and the spread of such micro-batches over routes.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a plan's routes in one step."""

    #: Micro-batches by route, in the order of compute.
    microbatches: tuple[tuple[int, ...], ...]
    #: By micro-batch: the lowest layer whose gradient still lacks it, where its backward ends. The
    #: number of layers means that only its loss is missing.
    lowest: Mapping[int, int]


def spread(microbatches: Sequence[int], plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Spread `microbatches` over the routes in proportion to their shares of a whole step.

    Each in turn goes to the route that would finish it first, where the shares measure the routes'
    speeds; ties go by the order of routes. A route's micro-batches are contiguous.
    """
    counts = [0] * len(plan.routes)
    heap = [(1 / route.microbatches, number) for number, route in enumerate(plan.routes)]
    heapq.heapify(heap)
    for _ in microbatches:
        _, number = heap[0]
        counts[number] += 1
        share = plan.routes[number].microbatches
        heapq.heapreplace(heap, ((counts[number] + 1) / share, number))
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return tuple(
        tuple(microbatches[end - count : end]) for count, end in zip(counts, ends, strict=True)
    )

"""The micro-batches of a step that is done again in part, in place of the plan's shares.

After a loss, gradients of many micro-batches are still there; the others are done again, each only
as far down as a layer lacks it. Pure data, and the spread of such micro-batches over routes.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a plan's routes in one step."""

    #: By route, in the order in which they are computed.
    microbatches: tuple[tuple[int, ...], ...]
    #: Of each: the lowest layer whose gradient still lacks it, and the number of layers where none
    #: does and only its loss is wanted. The backward ends there.
    lowest: Mapping[int, int]


def spread(microbatches: Sequence[int], plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Hand `microbatches` out to the routes in proportion to their shares of a whole step.

    Each in turn goes to the route that would be done with it first, as far as the shares tell how
    fast that is; equal routes go by their order. A route's micro-batches are contiguous.
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

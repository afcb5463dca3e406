"""Which gradients are summed over whom: buckets, from where the pipelines of a plan hold layers.

Owns the cut of layers into pieces where stages of different numbers of workers hold them. Must not
know the order of compute or times.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.planner.ids import WorkerId
from oobleck.planner.plan import Plan, Stage
from oobleck.planner.program import LayerPart, Share, SyncGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parts that are summed over the same workers in one go."""

    owners: tuple[WorkerId, ...]
    parts: tuple[LayerPart, ...]


def gradient_buckets(plan: Plan, *, tied: bool) -> tuple[Bucket, ...]:
    """One bucket for each distinct set of owners, highest layers first; the index is the number.

    A part is in a bucket exactly when its owners are the bucket's, so every owner holds every
    `own` part of it. The tied part is one part with two places: its owners are the holders of
    layer 0 and of the head, and each syncs what it holds of it.
    """
    by_owners: dict[tuple[WorkerId, ...], list[LayerPart]] = defaultdict(list)
    for layers, stages in _runs(plan):
        for share, owners in _pieces(stages):
            by_owners[owners].extend(
                LayerPart(layer=layer, part="own", share=share) for layer in layers
            )
    if tied:
        ends = sorted({0, plan.layer_count - 1})
        stages = [stage for p in plan.pipelines for stage in (p.stages[0], p.stages[-1])]
        for share, owners in _pieces(stages):
            by_owners[owners].extend(
                LayerPart(layer=layer, part="tied", share=share) for layer in ends
            )
    # No two owner sets share an own part's layer, except where it is cut into pieces; only those
    # and the tied bucket can need the tie-break.
    order = sorted(
        by_owners, key=lambda owners: (-max(part.layer for part in by_owners[owners]), owners)
    )
    return tuple(Bucket(owners=owners, parts=tuple(by_owners[owners])) for owners in order)


def syncs_by_worker(buckets: Sequence[Bucket], plan: Plan) -> Mapping[WorkerId, list[SyncGradient]]:
    """The sums that each worker takes part in, in the order of the buckets."""
    held = plan.holdings()
    syncs: dict[WorkerId, list[SyncGradient]] = {worker: [] for worker in held}
    for number, bucket in enumerate(buckets):
        parts_of: dict[range, tuple[LayerPart, ...]] = {}
        for worker in bucket.owners:
            layers = held[worker]
            if layers not in parts_of:
                parts_of[layers] = tuple(part for part in bucket.parts if part.layer in layers)
            syncs[worker].append(
                SyncGradient(bucket=number, parts=parts_of[layers], owners=bucket.owners)
            )
    return syncs


def _runs(plan: Plan) -> Iterator[tuple[range, list[Stage]]]:
    """Maximal runs of layers that every pipeline holds in one stage, with those stages."""
    starts = sorted({stage.first_layer for p in plan.pipelines for stage in p.stages})
    reached = [0] * len(plan.pipelines)
    for start, stop in zip(starts, [*starts[1:], plan.layer_count], strict=True):
        stages = []
        for number, pipeline in enumerate(plan.pipelines):
            while pipeline.stages[reached[number]].last_layer < start:
                reached[number] += 1
            stages.append(pipeline.stages[reached[number]])
        yield range(start, stop), stages


def _pieces(stages: Collection[Stage]) -> Iterator[tuple[Share, tuple[WorkerId, ...]]]:
    """What the stages hold in common, cut wherever one of them changes the worker that owns it.

    Worker p of d owns the p-th d-th. Yields each piece with its owners, sorted.
    """
    sizes = {len(stage.workers) for stage in stages}
    of = math.lcm(*sizes)
    cuts = sorted({p * of // size for size in sizes for p in range(size)} | {of})
    for start, stop in pairwise(cuts):
        owners = {stage.workers[start * len(stage.workers) // of] for stage in stages}
        yield Share(start, stop, of), tuple(sorted(owners))

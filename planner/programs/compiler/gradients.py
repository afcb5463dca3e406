"""Buckets of gradients and the owners that sum them, by the holds of a plan.

A sum over few workers costs milliseconds however small it is, and starts only when all of it is
ready. So layers with the same owners share a bucket up to a size, and then the next one. Owns the
cut of layers into pieces where different numbers of workers share them. Must not know the order of
compute or times.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import LayerPart, Share, SyncGradient
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Shard
from oobleck.core.ties import Ties, groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parts that are summed over the same workers in one operation."""

    owners: tuple[WorkerId, ...]
    parts: tuple[LayerPart, ...]


#: Size at which a bucket is full (as in Li et al., PyTorch Distributed, §4.2).
BUCKET_BYTES = 25 << 20


def gradient_buckets(
    plan: Plan, *, tied: Ties, layer_bytes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Return the buckets, highest layers first; the index is the number.

    Each distinct set of owners has one bucket or, where `layer_bytes` has the size of each layer's
    gradient, as many as fill up. The buckets of one set are in the order in which a backward
    completes their layers. The tied part is last: owners of both of its ends have it with layer 0.

    A part is in a bucket exactly when its owners are the bucket's, so every owner holds every `own`
    part of it. Parameters that layers share are one part with several places: its owners are the
    holders of all these layers, and each syncs the places it holds. No bucket has two such parts.
    """
    by_owners: dict[tuple[WorkerId, ...], list[LayerPart]] = defaultdict(list)
    for layers, holds in _runs(plan):
        for share, owners in _pieces(holds):
            by_owners[owners].extend(
                LayerPart(layer=layer, part="own", share=share) for layer in layers
            )
    further: list[tuple[tuple[WorkerId, ...], list[LayerPart]]] = []
    for places in groups(tied, plan.layer_count):
        holds = [hold for hold in plan.holds if any(layer in hold.layers for layer in places)]
        for share, owners in _pieces(holds):
            shared = [LayerPart(layer=layer, part="tied", share=share) for layer in places]
            if any(part.part == "tied" for part in by_owners[owners]):
                further.append((owners, shared))
            else:
                by_owners[owners].extend(shared)
    buckets = [
        Bucket(owners=owners, parts=tuple(parts))
        for owners, held in [*by_owners.items(), *further]
        for parts in (_filled(held, layer_bytes) if layer_bytes is not None else [held])
    ]
    # The owners break ties: two buckets have parts of one layer only if it is cut into pieces, or
    # tied.
    return tuple(sorted(buckets, key=lambda bucket: (-_highest(bucket), bucket.owners)))


def _highest(bucket: Bucket) -> int:
    """Return the highest layer of the bucket's own parts, or of its tied ones if it has no
    others.
    """
    own = [part.layer for part in bucket.parts if part.part == "own"]
    return max(own or [part.layer for part in bucket.parts])


def _filled(parts: Sequence[LayerPart], layer_bytes: Sequence[int]) -> Iterator[list[LayerPart]]:
    """Yield buckets of `parts`, which have the same owners: whole layers from the highest down, cut
    where a bucket is full. The tied ones stay with the lowest."""
    bucket: list[LayerPart] = []
    held = 0
    for part in sorted(parts, key=lambda part: (part.part == "tied", -part.layer)):
        if held >= BUCKET_BYTES and part.part == "own" and part.layer != bucket[-1].layer:
            yield sorted(bucket, key=_place)
            bucket, held = [], 0
        bucket.append(part)
        held += part.share.of_bytes(layer_bytes[part.layer])
    yield sorted(bucket, key=_place)


def _place(part: LayerPart) -> tuple[str, int, Share]:
    return part.part, part.layer, part.share


def syncs_by_worker(
    buckets: Sequence[Bucket], plan: Plan, *, workers: Collection[WorkerId] | None = None
) -> Mapping[WorkerId, list[SyncGradient]]:
    """Return the sums that each of `workers`, by default all, takes part in, in the order of the
    buckets."""
    wanted = plan.workers if workers is None else workers
    syncs: dict[WorkerId, list[SyncGradient]] = {worker: [] for worker in wanted}
    for number, bucket in enumerate(buckets):
        parts_of: dict[frozenset[Shard], tuple[LayerPart, ...]] = {}
        for worker in (owner for owner in bucket.owners if owner in syncs):
            shards = plan.shards[worker]
            if shards not in parts_of:
                parts_of[shards] = tuple(_within(bucket.parts, shards))
            syncs[worker].append(
                SyncGradient(bucket=number, parts=parts_of[shards], owners=bucket.owners)
            )
    return syncs


def _within(parts: Iterable[LayerPart], shards: Iterable[Shard]) -> Iterator[LayerPart]:
    """Yield those of `parts` that a worker with these shards has."""
    shard_of = {shard.layer: shard for shard in shards}
    for part in parts:
        shard, share = shard_of.get(part.layer), part.share
        if (
            shard is not None
            and shard.part * share.of <= share.start * shard.parts
            and share.stop * shard.parts <= (shard.part + 1) * share.of
        ):
            yield part


def _runs(plan: Plan) -> Iterator[tuple[range, list[Hold]]]:
    """Yield maximal runs of layers that the same holds have, with those holds."""
    cuts = {hold.first_layer for hold in plan.holds} | {h.last_layer + 1 for h in plan.holds}
    runs = [range(start, stop) for start, stop in pairwise(sorted(cuts))]
    number = {run.start: index for index, run in enumerate(runs)}
    holds: list[list[Hold]] = [[] for _ in runs]
    for hold in plan.holds:
        for index in range(number[hold.first_layer], len(runs)):
            if runs[index].start > hold.last_layer:
                break
            holds[index].append(hold)
    yield from zip(runs, holds, strict=True)


def _pieces(holds: Collection[Hold]) -> Iterator[tuple[Share, tuple[WorkerId, ...]]]:
    """Cut the holds' common layers wherever one of the holds changes the worker that owns a piece.

    Worker p of d owns the p-th d-th. Yields each piece with its owners, sorted.
    """
    sizes = {len(hold.workers) for hold in holds}
    of = math.lcm(*sizes)
    cuts = sorted({p * of // size for size in sizes for p in range(size)} | {of})
    for start, stop in pairwise(cuts):
        owners = {hold.workers[start * len(hold.workers) // of] for hold in holds}
        yield Share(start, stop, of), tuple(sorted(owners))

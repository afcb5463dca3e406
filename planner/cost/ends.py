"""The end of a step: gradient sums, vote and update, from when each worker or stage finishes.

`plan_end_s` computes it worker by worker, for any plan; `step_end_s` once per kind of pipeline, for
plans whose workers run every layer that they hold. Must not know how routes compute.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Share
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile, all_reduce_s
from oobleck.core.ties import Ties, groups
from oobleck.planner.cost.kinds import Kind, Place
from oobleck.planner.programs.compiler.gradients import gradient_buckets

#: Bytes of a vote's message: loss, norm and flags.
_VOTE_BYTES = 64


def plan_end_s(
    plan: Plan, ends_s: Mapping[WorkerId, float], profile: Profile, *, tied: Ties
) -> float:
    """Return when the step is over on all workers, from when each finishes its compute (`ends_s`).

    After its compute come a worker's gradient sums, the vote and the update.
    """
    return updated_s(plan, summed_ends_s(plan, ends_s, profile, tied=tied), profile)


def updated_s(plan: Plan, summed_s: Mapping[WorkerId, float], profile: Profile) -> float:
    """Return when the step is over on all workers, from when each one's gradient sums are over."""
    vote_s = all_reduce_s(
        _VOTE_BYTES, workers=len(plan.workers), same_node=False, links=profile.links
    )
    return max(summed_s.values()) + vote_s + max(_updates_s(plan, profile).values())


def summed_ends_s(
    plan: Plan, ends_s: Mapping[WorkerId, float], profile: Profile, *, tied: Ties
) -> dict[WorkerId, float]:
    """Return when each worker's compute and gradient sums are over.

    Each worker's link carries its sums one after the other as they become ready. A worker that
    holds a layer without running it adds no wait, and one that computes nothing is not in `ends_s`.
    """
    idle = plan.shadows
    sums: list[tuple[float, float, tuple[WorkerId, ...]]] = []
    for bucket in gradient_buckets(plan, tied=tied):
        own = {part.layer: part.share for part in bucket.parts if part.part == "own"}
        taken_s = all_reduce_s(
            sum(s.of_bytes(profile.layers[layer].summed_bytes) for layer, s in own.items()),
            workers=len(bucket.owners),
            same_node=len({owner.node for owner in bucket.owners}) == 1,
            links=profile.links,
        )
        layers = {part.layer for part in bucket.parts}
        running = [
            owner
            for owner in bucket.owners
            if owner not in idle or layers.intersection(plan.held[owner]).difference(idle[owner])
        ]
        ready_s = max((ends_s.get(owner, 0.0) for owner in running), default=0.0)
        sums.append((ready_s, taken_s, bucket.owners))
    # Sorted once, the sums of each link are in order too.
    linked_s = dict.fromkeys(plan.workers, 0.0)
    for ready_s, taken_s, owners in sorted(sums):
        for owner in owners:
            linked_s[owner] = max(linked_s[owner], ready_s) + taken_s
    return {worker: max(ends_s.get(worker, 0.0), end_s) for worker, end_s in linked_s.items()}


def _updates_s(plan: Plan, profile: Profile) -> dict[WorkerId, float]:
    update_s = dict.fromkeys(plan.workers, 0.0)
    known: dict[tuple[int, int, int], float] = {}
    for hold in plan.holds:
        width = len(hold.workers)
        kind = hold.first_layer, hold.last_layer, width
        if kind not in known:
            updates = (profile.layers[layer].update_s for layer in hold.layers)
            known[kind] = sum(each.get(width, 0.0) for each in updates)
        for worker in hold.workers:
            # Without rates, skip a call for each of many workers.
            update_s[worker] += known[kind] / (plan.rate((worker,)) if plan.rates else 1.0)
    return update_s


# ---- The end of a step: gradient sums, vote and update, after each stage's compute.
#
# One pipeline represents all of its kind.


#: Worker, as (number of the kind, stage, worker in the stage).
_Owner = tuple[int, int, int]
#: Seconds at which a sum is ready, and seconds that it takes.
_Sum = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Kind of pipeline: its count, and when each of its stages finishes its compute, in seconds."""

    count: int
    kind: Kind
    ends_s: Sequence[float]

    @property
    def places(self) -> Sequence[Place]:
        return self.kind.cut.places


def step_end_s(kinds: Sequence[Computed], profile: Profile, *, tied: Ties) -> float:
    """Return when the step is over on all workers.

    Runs of layers that every pipeline has in one stage are summed, in pieces where stages of
    different numbers of workers share the layers. Parameters that `tied` layers share are summed
    over all of them. A sum is ready when its last owner is. Each worker's link carries its sums one
    after the other as they become ready. All pipelines of a kind reach each sum at the same time.
    """
    sums: dict[_Owner, list[_Sum]] = {
        (number, position, worker): []
        for number, kind in enumerate(kinds)
        for position, place in enumerate(kind.places)
        for worker in range(place.gpus)
    }
    for stages, layers, weight in _summed(kinds, profile, tied=tied):
        _add_sums(sums, kinds, stages, layers, weight, profile)
    summed_s = max(
        max(kinds[number].ends_s[position], in_turn(own))
        for (number, position, _), own in sums.items()
    )
    workers = sum(kind.count * kind.kind.cut.workers for kind in kinds)
    vote_s = all_reduce_s(_VOTE_BYTES, workers=workers, same_node=False, links=profile.links)
    return summed_s + vote_s + max(s.update_s for kind in kinds for s in kind.kind.cut.stages)


def in_turn(sums: Iterable[_Sum]) -> float:
    """Return when the last of one link's sums, or messages, ends."""
    end = 0.0
    for ready_s, taken_s in sorted(sums):
        end = max(end, ready_s) + taken_s
    return end


def _summed(
    kinds: Sequence[Computed], profile: Profile, *, tied: Ties
) -> Iterator[tuple[list[tuple[int, int]], list[int], int]]:
    """Yield each group of layers that is summed together. It has the (kind, stage) pairs that hold
    it, the bytes of each layer's own parameters, and the bytes of shared ones."""
    own = [layer.summed_bytes for layer in profile.layers]
    shared = {places: min(own[layer] for layer in places) for places in groups(tied, len(own))}
    for places, weight in shared.items():
        for layer in places:
            own[layer] -= weight
    whole = all(len(kind.places) == 1 for kind in kinds)
    for layers, at in _runs(kinds):
        # Where every pipeline is one stage, shared parameters have the owners of all the rest.
        weight = sum(shared.values()) if whole else 0
        yield list(enumerate(at)), [own[layer] for layer in layers], weight
    for places, weight in () if whole else shared.items():
        holders = {
            (number, position)
            for number, kind in enumerate(kinds)
            for position, place in enumerate(kind.places)
            if any(place.first_layer <= layer <= place.last_layer for layer in places)
        }
        yield sorted(holders), [], weight


def _runs(kinds: Sequence[Computed]) -> Iterator[tuple[range, list[int]]]:
    """Yield maximal runs of layers that every kind has in one stage, with those stages; last run
    first.
    """
    at = [len(kind.places) - 1 for kind in kinds]
    stop = kinds[0].places[-1].last_layer + 1
    while stop:
        for number, kind in enumerate(kinds):
            while kind.places[at[number]].first_layer >= stop:
                at[number] -= 1
        first = max(kind.places[p].first_layer for kind, p in zip(kinds, at, strict=True))
        yield range(first, stop), list(at)
        stop = first


def _add_sums(
    sums: dict[_Owner, list[_Sum]],
    kinds: Sequence[Computed],
    stages: Sequence[tuple[int, int]],
    layers: Sequence[int],
    weight: int,
    profile: Profile,
) -> None:
    """Add the sums over `stages` (kind, stage), one for each piece."""
    places = [kinds[number].places[position] for number, position in stages]
    ready_s = max(kinds[number].ends_s[position] for number, position in stages)
    same_node = (
        len({number for number, _ in stages}) == 1
        and kinds[stages[0][0]].count == 1
        and len({place.node for place in places}) == 1
    )
    for share in _pieces(place.gpus for place in places):
        taken_s = all_reduce_s(
            sum(share.of_bytes(layer) for layer in layers) + share.of_bytes(weight),
            workers=sum(kinds[number].count for number, _ in stages),
            same_node=same_node,
            links=profile.links,
        )
        for (number, position), place in zip(stages, places, strict=True):
            owner = number, position, share.start * place.gpus // share.of
            sums[owner].append((ready_s, taken_s))


def _pieces(sizes: Iterable[int]) -> Iterator[Share]:
    """Yield the pieces of a layer between all the places where stages of these sizes cut it."""
    widths = set(sizes)
    of = math.lcm(*widths)
    cuts = sorted({p * of // size for size in widths for p in range(size)} | {of})
    for start, stop in pairwise(cuts):
        yield Share(start, stop, of)

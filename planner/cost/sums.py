"""The end of a step: gradient sums, vote and update, after each stage's compute.

One pipeline represents all of its kind. Must not know how pipelines compute, nor where plans come
from.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.core.instructions import Share
from oobleck.core.profile import Profile, all_reduce_s
from oobleck.core.ties import Ties, groups
from oobleck.planner.cost.kinds import Kind, Place

#: Bytes of a vote's message: loss, norm and flags.
_VOTE_BYTES = 64

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
        max(kinds[number].ends_s[position], _in_turn(own))
        for (number, position, _), own in sums.items()
    )
    workers = sum(kind.count * kind.kind.cut.workers for kind in kinds)
    vote_s = all_reduce_s(_VOTE_BYTES, workers=workers, same_node=False, links=profile.links)
    return summed_s + vote_s + max(s.update_s for kind in kinds for s in kind.kind.cut.stages)


def _in_turn(sums: Iterable[_Sum]) -> float:
    """Return when the last of one worker's sums ends."""
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

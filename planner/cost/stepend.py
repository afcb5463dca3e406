"""The end of a step: gradient sums, vote and update, from when each stage has computed its last.

The one place for these times where pipelines of a kind stand for each other;
`oobleck.planner.cost.simulate` finds the same from programs, worker by worker. Must not know how
pipelines compute, nor where plans come from.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from oobleck.planner.cost.formula import in_turn, vote_s
from oobleck.planner.profile.links import all_reduce_s
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.instructions import Share

#: A worker by number of the kind, of its stage and in it, and the link's work there.
_Owner = tuple[int, int, int]
#: When the sum is ready, and what it takes, seconds.
_Sum = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedStage:
    """Layers on some workers of the pipeline's node number `node`, and how long they compute."""

    first_layer: int
    #: Inclusive.
    last_layer: int
    gpus: int
    node: int
    #: When its last forward or backward is over, seconds.
    computed_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedKind:
    """So many pipelines that are alike, of these stages."""

    count: int
    stages: Sequence[ComputedStage]


def step_end_s(kinds: Sequence[ComputedKind], profile: Profile, *, tied: bool) -> float:
    """When the step is over on all workers.

    Runs of layers that every pipeline has in one stage are summed, in pieces where stages of
    different numbers of workers share the layers; so is the weight that head and embedding share,
    if they are `tied`, over both. A sum is ready when its last owner is; each worker's link passes
    its sums on one after the other, as they become ready. One pipeline stands for its kind: all of
    a kind come to each sum at the same time.
    """
    sums: dict[_Owner, list[_Sum]] = {}
    for number, kind in enumerate(kinds):
        for position, stage in enumerate(kind.stages):
            for worker in range(stage.gpus):
                sums[number, position, worker] = []
    for places, layers, weight in _summed(kinds, profile, tied=tied):
        _add_sums(sums, kinds, places, layers, weight, profile)
    summed_s = max(
        max(kinds[number].stages[position].computed_s, in_turn(own))
        for (number, position, _), own in sums.items()
    )
    workers = sum(kind.count * stage.gpus for kind in kinds for stage in kind.stages)
    update_s = max(stage.update_s for kind in kinds for stage in kind.stages)
    return summed_s + vote_s(workers, profile.links) + update_s


def _summed(
    kinds: Sequence[ComputedKind], profile: Profile, *, tied: bool
) -> Iterator[tuple[list[tuple[int, int]], list[int], int]]:
    """What is summed in one go: the (kind, stage) that hold it, the bytes of each layer's own
    parameters, and those of the tied weight, if it is of them."""
    own = [layer.parameter_bytes for layer in profile.layers]
    weight = min(own[0], own[-1]) if tied else 0
    if tied:
        for end in {0, len(own) - 1}:
            own[end] -= weight
    whole = all(len(kind.stages) == 1 for kind in kinds)
    for layers, at in _runs(kinds):
        # Where every pipeline is one stage, the tied weight has the owners of all the rest.
        yield list(enumerate(at)), [own[layer] for layer in layers], weight if whole else 0
    if tied and not whole:
        ends = {(n, p) for n, kind in enumerate(kinds) for p in (0, len(kind.stages) - 1)}
        yield sorted(ends), [], weight


def _runs(kinds: Sequence[ComputedKind]) -> Iterator[tuple[range, list[int]]]:
    """Maximal runs of layers that every kind has in one stage, last first, with those stages."""
    at = [len(kind.stages) - 1 for kind in kinds]
    stop = kinds[0].stages[-1].last_layer + 1
    while stop:
        for number, kind in enumerate(kinds):
            while kind.stages[at[number]].first_layer >= stop:
                at[number] -= 1
        first = max(kind.stages[p].first_layer for kind, p in zip(kinds, at, strict=True))
        yield range(first, stop), list(at)
        stop = first


def _add_sums(
    sums: dict[_Owner, list[_Sum]],
    kinds: Sequence[ComputedKind],
    places: Sequence[tuple[int, int]],
    layers: Sequence[int],
    weight: int,
    profile: Profile,
) -> None:
    """The sums over the stages at `places`, one for each piece."""
    stages = [kinds[number].stages[position] for number, position in places]
    same_node = (
        len({number for number, _ in places}) == 1
        and kinds[places[0][0]].count == 1
        and len({stage.node for stage in stages}) == 1
    )
    for share in _pieces(stage.gpus for stage in stages):
        owners = [
            (number, position, share.start * stage.gpus // share.of)
            for (number, position), stage in zip(places, stages, strict=True)
        ]
        taken_s = all_reduce_s(
            sum(share.of_bytes(layer) for layer in layers) + share.of_bytes(weight),
            workers=sum(kinds[number].count for number, _ in places),
            same_node=same_node,
            links=profile.links,
        )
        ready_s = max(stage.computed_s for stage in stages)
        for owner in owners:
            sums[owner].append((ready_s, taken_s))


def _pieces(sizes: Iterable[int]) -> Iterator[Share]:
    """Cut wherever a stage of so many workers changes the one that owns it."""
    widths = set(sizes)
    of = math.lcm(*widths)
    cuts = sorted({p * of // size for size in widths for p in range(size)} | {of})
    for start, stop in pairwise(cuts):
        yield Share(start, stop, of)

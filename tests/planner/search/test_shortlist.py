"""Cuts of equal T: which there are, and which of them become templates."""

import random
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest

from oobleck.core.profile import Links, Profile
from oobleck.planner.cost.kinds import Kind
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stages import StageTable, stage_cost
from oobleck.planner.search.demand import Costed
from oobleck.planner.search.templates import (
    evened,
    feasible_sizes,
    generate_templates,
    least_cuts,
    shortlisted_templates,
    shortlists,
    template_of,
)
from support.profiles import profile_of

SLOW = Links(intra_node_bytes_per_s=500.0, inter_node_bytes_per_s=100.0, latency_s=0.01)


def question(seed: int) -> tuple[Profile, tuple[int, ...]]:
    rng = random.Random(seed)
    while True:
        # On one GPU, times are whole, and what is equal on paper is so in ticks.
        layers = rng.randint(6, 12)
        profile = profile_of(
            [float(rng.randint(1, 2)) for _ in range(layers)],
            state=[rng.randint(1, 9) for _ in range(layers)],
            activation=rng.randint(0, 2),
            memory=rng.choice([30, 60, 1000]),
            links=SLOW,
        )
        if sizes := feasible_sizes(profile, 5):
            return profile, sizes


def tied_groups(profile: Profile, sizes: Sequence[int]) -> list[list[Costed]]:
    table = StageTable(profile)
    return [
        [Costed(template_of(table, nodes, cut), profile) for cut in cuts]
        for nodes, cuts in least_cuts(table, sizes).items()
    ]


def replay_s(costed: Costed) -> float:
    kind = Kind(2 * len(costed.template.stages), costed.cut)
    (finish,) = computed_s([("1f1b", kind)]).values()
    return max(finish)


@pytest.mark.parametrize("seed", range(20))
def test_tied_cuts_have_the_same_t_and_fit(seed: int) -> None:
    profile, sizes = question(seed)
    table = StageTable(profile)
    groups = [[each.template for each in group] for group in tied_groups(profile, sizes)]
    assert [group[0].nodes for group in groups] == list(sizes)
    for group in groups:
        assert len({template.iteration_s for template in group}) == 1
        assert len({template.stages for template in group}) == len(group)
        for template in group:
            kept = range(len(template.stages), 0, -1)
            for stage, in_flight in zip(template.stages, kept, strict=True):
                cost = stage_cost(profile, stage.first_layer, stage.last_layer, stage.gpus)
                assert cost.worker_bytes(in_flight, replicas=2) <= profile.gpu_memory_bytes
            assert table.fits(
                tuple((s.first_layer, s.last_layer + 1, s.gpus) for s in template.stages)
            )


def test_there_are_ties_to_break() -> None:
    groups = [group for seed in range(20) for group in tied_groups(*question(seed))]
    assert sum(len(group) > 1 for group in groups) > len(groups) / 5


@pytest.mark.parametrize("seed", range(20))
def test_the_quickest_comes_first_and_the_search_s_own_is_kept(seed: int) -> None:
    profile, sizes = question(seed)
    groups = tied_groups(profile, sizes)
    for group, few in zip(groups, shortlists(groups), strict=True):
        times = [replay_s(each) for each in group]
        assert few.quickest is group[int(np.argmin(times))]
        assert few.first_found is group[0]
        assert len(few.all) == min(3, len(group))
        assert set(few.all) <= set(group)
    best = generate_templates(profile, sizes)
    assert [few.quickest.template for few in shortlists(groups)] == list(best.values())


def test_a_cut_with_too_many_links_comes_last_however_quick_it_is() -> None:
    """A stage of one worker between stages of eight and of seven has 30, beside its sums."""
    profile = profile_of([8.0, 1.0, 7.0, 8.0], gpus=range(1, 9), gpus_per_node=8)
    table = StageTable(profile)
    crowded, other = (
        Costed(template_of(table, 3, ((0, 1, 8), (1, 2, few), (2, 3, 8 - few), (3, 4, 8))), profile)
        for few in (1, 4)
    )
    assert replay_s(crowded) < replay_s(other)
    (few,) = shortlists([[crowded, other]])
    assert few.quickest is other
    assert few.first_found is crowded


def test_the_same_profile_gives_the_same_templates() -> None:
    for seed in range(5):
        profile, sizes = question(seed)
        once, again = (shortlisted_templates(profile, sizes) for _ in range(2))
        for size in sizes:
            assert [one.template for one in once[size].all] == [
                other.template for other in again[size].all
            ]


@pytest.mark.parametrize("seed", range(20))
def test_an_evened_cut_has_the_fewest_gradients_of_all_that_are_as_fast(seed: int) -> None:
    profile, sizes = question(seed)
    table = StageTable(profile)
    sums = list(accumulate((layer.summed_bytes for layer in profile.layers), initial=0))
    for cuts in least_cuts(table, sizes).values():
        slowest = max(table.stage_time(*stage) for stage in cuts[0])
        every = [
            tuple((first, stop, 1) for first, stop in pairwise((0, *inner, table.layers)))
            for inner in combinations(range(1, table.layers), len(cuts[0]) - 1)
        ]
        fast = [cut for cut in every if max(table.stage_time(*one) for one in cut) <= slowest]
        most = [max(sums[stop] - sums[first] for first, stop, _ in cut) for cut in fast]
        found = evened(table, sums, cuts[0])
        assert found in fast
        assert most[fast.index(found)] == min(most)

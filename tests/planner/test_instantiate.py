"""Which pipelines, and their shares of the batch, against every combination."""

import itertools
import random
from collections.abc import Iterator

import pytest

from oobleck.planner.cost import PipelineCost, pipeline_cost, sync_ticks
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.instantiate import choose_sizes, instantiate, share_batch
from oobleck.planner.templates import generate_templates
from support.profiles import profile_of, random_profile


def combinations(sizes: list[int], nodes: int, biggest: int) -> Iterator[tuple[int, ...]]:
    if nodes == 0:
        yield ()
    for size in sizes:
        if size <= min(nodes, biggest):
            for rest in combinations(sizes, nodes - size, size):
                yield (size, *rest)


def all_shares(pipelines: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, microbatches), pipelines - 1):
        ends = (0, *inner, microbatches)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


def slowest(costs: list[PipelineCost], shares: tuple[int, ...]) -> int:
    return max(cost.time(share) for cost, share in zip(costs, shares, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_the_best_combination_is_found(seed: int) -> None:
    rng = random.Random(seed)
    profile = random_profile(rng, layers=rng.randint(3, 7))
    # Sums that cost little, as much as compute, or most of all.
    profile = profile_of(
        [layer.forward_s[1] for layer in profile.layers],
        state=[rng.choice([10, 10**9, 10**10]) * rng.randint(1, 5) for _ in profile.layers],
    )
    smallest = rng.randint(1, 2)
    templates = generate_templates(profile, range(smallest, rng.randint(smallest, 3) + 1))
    nodes, microbatches, least = rng.randint(2, 8), rng.randint(1, 9), rng.randint(1, 2)
    costs = {size: pipeline_cost(template, profile) for size, template in templates.items()}

    def step(sizes: tuple[int, ...]) -> int:
        chosen = [costs[size] for size in sizes]
        compute = min(slowest(chosen, s) for s in all_shares(len(sizes), microbatches))
        sync = max(
            sync_ticks(cost.gradient_bytes, pipelines=len(sizes), links=profile.links)
            for cost in chosen
        )
        return compute + sync

    candidates = {
        sizes: step(sizes)
        for sizes in combinations(sorted(templates), nodes, nodes)
        if least <= len(sizes) <= microbatches
    }
    if not candidates:
        with pytest.raises(PlanInfeasible):
            choose_sizes(
                templates, nodes, profile=profile, microbatches=microbatches, min_pipelines=least
            )
        return
    sizes = choose_sizes(
        templates, nodes, profile=profile, microbatches=microbatches, min_pipelines=least
    )
    best = min(candidates.values())
    assert candidates[sizes] == best
    assert len(sizes) == max(len(s) for s, time in candidates.items() if time == best)


@pytest.mark.parametrize("seed", range(40))
def test_shares_finish_the_slowest_pipeline_soonest(seed: int) -> None:
    rng = random.Random(seed)
    costs = [
        PipelineCost(first=rng.randint(1, 40), period=rng.randint(0, 9), gradient_bytes=0)
        for _ in range(rng.randint(1, 4))
    ]
    microbatches = rng.randint(len(costs), 9)
    shares = share_batch(costs, microbatches)
    assert sum(shares) == microbatches
    assert min(shares) >= 1
    expected = min(slowest(costs, s) for s in all_shares(len(costs), microbatches))
    assert slowest(costs, shares) == expected


def names(count: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(count)]


def test_nodes_go_to_pipelines_by_name() -> None:
    profile = profile_of([1.0] * 6)
    templates = generate_templates(profile, range(2, 4))
    plan = instantiate(
        templates,
        list(reversed(names(5))),
        profile=profile,
        microbatches=12,
        min_pipelines=2,
        generation=Generation(3),
    )
    assert [p.nodes for p in plan.pipelines] == [("n0", "n1", "n2"), ("n3", "n4")]
    assert [p.microbatches for p in plan.pipelines] == [7, 5]
    assert plan.generation == 3


def test_too_few_nodes_and_too_few_microbatches_are_causes() -> None:
    profile = profile_of([1.0] * 6)
    templates = generate_templates(profile, range(2, 4))
    with pytest.raises(PlanInfeasible) as caught:
        instantiate(
            templates,
            names(3),
            profile=profile,
            microbatches=1,
            min_pipelines=2,
            generation=Generation(1),
        )
    assert caught.value.causes == (
        "needs 4 nodes: 2 pipelines of at least 2 nodes; 3 are live",
        "2 pipelines need as many micro-batches, and the batch has 1; enlarge global_batch or "
        "lower microbatch",
    )


def test_nodes_that_no_combination_can_use_are_left_out() -> None:
    """Three layers and one micro-batch keep three nodes busy at most."""
    profile = profile_of([1.0] * 3)
    plan = instantiate(
        generate_templates(profile, range(1, 4)),
        names(5),
        profile=profile,
        microbatches=1,
        min_pipelines=1,
        generation=Generation(1),
    )
    assert plan.nodes == ("n0", "n1", "n2")


def test_sixty_four_nodes_are_all_used() -> None:
    rng = random.Random(2)
    profile = profile_of([rng.random() for _ in range(66)], state=10**8, memory=10**9)
    templates = generate_templates(profile, range(8, 20))
    sizes = choose_sizes(templates, 64, profile=profile, microbatches=512, min_pipelines=2)
    assert sum(sizes) == 64

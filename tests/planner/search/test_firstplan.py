"""The first plan: never slower than what the formula alone would make, under its schedule."""

import random
from dataclasses import replace

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan, place
from oobleck.core.profile import Links, Profile
from oobleck.planner.cost.estimate import Replays, estimate_step
from oobleck.planner.cost.stages import StageTable, pipeline_cost
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.choose import choose_schedule
from oobleck.planner.search.firstplan import (
    FirstPlan,
    _Maker,
    make_first_plan,
    node_specification,
)
from oobleck.planner.search.instantiate import instantiate
from oobleck.planner.search.templates import least_cuts, template_of
from support.plans import plan_of_cuts
from support.profiles import profile_of


def question(seed: int) -> tuple[Profile, list[NodeName], int]:
    rng = random.Random(seed)
    layers, nodes = rng.randint(8, 16), rng.randint(6, 12)
    profile = profile_of(
        [float(rng.randint(1, 2)) for _ in range(layers)],
        activation=rng.randint(0, 60),
        memory=rng.randint(7000, 9000),
        links=Links(
            intra_node_bytes_per_s=500.0,
            inter_node_bytes_per_s=rng.choice([100.0, 1e3, 1e6]),
            latency_s=0.01,
        ),
    )
    return profile, [NodeName(f"n{n:02}") for n in range(nodes)], rng.randint(8, 40)


def planned(
    catalogue: Catalogue, profile: Profile, nodes: list[NodeName], microbatches: int
) -> FirstPlan:
    return make_first_plan(
        catalogue,
        node_specification(profile, nodes=len(nodes), fault_tolerance=1),
        nodes,
        profile=profile,
        microbatches=microbatches,
        min_pipelines=2,
        generation=Generation(1),
    )


def by_formula_alone(profile: Profile, nodes: list[NodeName], microbatches: int) -> Plan:
    """With the first cut of least T for each size, and the best sizes by the formula."""
    sizes = node_specification(profile, nodes=len(nodes), fault_tolerance=1)
    table = StageTable(profile)
    cuts = least_cuts(table, sizes)
    return instantiate(
        {n: template_of(table, n, few[0]) for n, few in cuts.items()},
        nodes,
        profile=profile,
        microbatches=microbatches,
        min_pipelines=2,
        generation=Generation(1),
    )


def test_it_is_never_slower_than_by_formula_alone() -> None:
    faster = 0
    for seed in range(30):
        profile, nodes, microbatches = question(seed)
        made = planned(Catalogue(tied=True), profile, nodes, microbatches)
        plain = choose_schedule(by_formula_alone(profile, nodes, microbatches), profile, tied=True)
        step_s = estimate_step(made.plan, profile, tied=True).step_s
        assert step_s == made.choice.step_s
        assert step_s <= plain.step_s * (1 + 1e-12), seed
        assert set(made.plan.nodes) == set(nodes)
        assert made.plan.microbatches == microbatches
        faster += step_s < plain.step_s * 0.999
    assert faster >= 3


def test_a_step_takes_no_longer_with_more_memory() -> None:
    """In half of it, all pipelines are of two nodes with as many gradients each. With all of it,
    one node holds the model."""
    links = Links(intra_node_bytes_per_s=1e10, inter_node_bytes_per_s=250.0, latency_s=1e-5)
    profile = profile_of([0.25] * 7 + [0.5], activation=1, memory=9000, links=links)
    nodes = [NodeName(f"n{number}") for number in range(8)]
    half = replace(profile, gpu_memory_bytes=4500)
    step_s, half_s = (
        planned(Catalogue(tied=False), p, nodes, 16).choice.step_s for p in (profile, half)
    )
    assert step_s <= half_s


def test_later_plans_are_made_of_the_same_cuts() -> None:
    for seed in range(10):
        profile, nodes, microbatches = question(seed)
        catalogue = Catalogue(tied=True)
        made = planned(catalogue, profile, nodes, microbatches)
        sizes = node_specification(profile, nodes=len(nodes), fault_tolerance=1)
        assert catalogue.offer(profile, sizes, made.plan) == made.offer
        for pipeline in made.plan.pipelines:
            stages = made.offer.templates[len(pipeline.nodes)].stages
            assert [s.layers for s in stages] == [s.layers for s in pipeline.stages]


def test_another_process_knows_the_cuts_from_the_plan() -> None:
    other = 0
    for seed in range(10):
        profile, nodes, _ = question(seed)
        sizes = node_specification(profile, nodes=len(nodes), fault_tolerance=1)
        plain = Catalogue(tied=True).offer(profile, sizes)
        for size in sizes:
            for template in (each.template for each in plain.equals[size]):
                pipeline = place(template, tuple(nodes[:size]), microbatches=4)
                plan = Plan.of_pipelines([pipeline], generation=Generation(1))
                offer = Catalogue(tied=True).offer(profile, sizes, plan)
                assert offer.templates == {**plain.templates, size: template}
                assert offer.costs[size] == pipeline_cost(template, profile)
                other += template != plain.templates[size]
    assert other


def test_a_wanted_schedule_that_fits_no_plan_is_refused() -> None:
    profile = profile_of([1.0] * 4, state=1000, activation=100, memory=2500)
    with pytest.raises(PlanInfeasible, match="pipeline_schedule gpipe needs"):
        make_first_plan(
            Catalogue(tied=False),
            range(2, 3),
            [NodeName("n1"), NodeName("n2")],
            profile=profile,
            microbatches=8,
            min_pipelines=1,
            generation=Generation(1),
            wanted="gpipe",
        )


def test_a_plan_that_nccl_cannot_carry_ranks_behind_all_others() -> None:
    """A stage of one worker between two of eight has 32 links."""
    profile = profile_of([1.0, 1e-6, 1.0], gpus=range(1, 9), gpus_per_node=8)
    replays = Replays(profile, tied=False)
    maker = _Maker(replays=replays, profile=profile, wanted=None, tied=False)
    plans = [plan_of_cuts(([(1, 8), (1, middle), (1, 8)], 4)) for middle in (1, 8)]
    (crowded, quick_s), (other, slow_s) = maker.ranks(plans)
    assert quick_s < slow_s, "otherwise this shows nothing"
    assert (crowded, other) == (True, False)

"""The replay of whole plans in arrays is the dry run of their programs."""

import random
from dataclasses import replace

import pytest

from oobleck.planner.cost.replay import StepReplay
from oobleck.planner.cost.simulate import simulate
from oobleck.planner.cost.steptime import estimate_step
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.profile.profile import Links
from oobleck.planner.programs.compile import compile_programs
from oobleck.planner.programs.plan import Plan, place
from oobleck.planner.search.templates import feasible_sizes, generate_templates
from support.profiles import random_profile


def plan_of(templates: dict, kinds: list[tuple[int, int]]) -> Plan:
    pipelines, node, microbatch = [], 0, 0
    for nodes, microbatches in kinds:
        names = tuple(NodeName(f"n{node + k:03}") for k in range(nodes))
        pipelines.append(
            place(templates[nodes], names, first_microbatch=microbatch, microbatches=microbatches)
        )
        node += nodes
        microbatch += microbatches
    return Plan(generation=Generation(1), pipelines=tuple(pipelines))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("gpus_per_node", "seeds"), [(1, 30), (2, 20), (4, 12)])
def test_replay_is_the_dry_run(gpus_per_node: int, seeds: int, tied: bool) -> None:
    for seed in range(seeds):
        rng = random.Random(f"{gpus_per_node} {seed}")
        profile = replace(
            random_profile(rng, layers=rng.randint(4, 9), gpus_per_node=gpus_per_node),
            links=Links(
                intra_node_bytes_per_s=rng.choice([3.0, 1e9]),
                inter_node_bytes_per_s=rng.choice([1.0, 1e9]),
                latency_s=0.01,
            ),
        )
        sizes = feasible_sizes(profile, 4)
        templates = generate_templates(profile, range(sizes[0], sizes[-1] + 1))
        plans = [
            [(rng.choice(sizes), rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
            for _ in range(3)
        ]
        replay = StepReplay(list(templates.values()), profile, tied=tied)
        times = replay.step_s([tuple(zip(*kinds, strict=True)) for kinds in plans])
        for kinds, time in zip(plans, times, strict=True):
            plan = plan_of(templates, kinds)
            expected = simulate(compile_programs(plan, tied=tied), profile, plan=plan)
            assert time == pytest.approx(expected.step_s, rel=1e-9), (seed, kinds)


@pytest.mark.parametrize("microbatches", [129, 10**6])
def test_many_microbatches_are_extrapolated_as_in_the_estimate(microbatches: int) -> None:
    profile = random_profile(random.Random(1), layers=9)
    templates = generate_templates(profile, range(1, 6))
    kinds = [(5, microbatches), (4, 7), (1, microbatches // 3)]
    replay = StepReplay(list(templates.values()), profile, tied=True)
    (time,) = replay.step_s([tuple(zip(*kinds, strict=True))])
    expected = estimate_step(plan_of(templates, kinds), profile, tied=True)
    assert time == pytest.approx(expected.step_s, rel=1e-9)

"""The replay of whole plans in arrays is the dry run of their programs."""

import random

import pytest

from oobleck.planner.compile import compile_programs
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.plan import Plan, place
from oobleck.planner.replay import StepReplay
from oobleck.planner.simulate import simulate
from oobleck.planner.templates import feasible_sizes, generate_templates
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


@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
def test_replay_is_the_dry_run(gpus_per_node: int) -> None:
    for seed in range(40):
        rng = random.Random(f"{gpus_per_node} {seed}")
        profile = random_profile(rng, layers=rng.randint(4, 12), gpus_per_node=gpus_per_node)
        sizes = feasible_sizes(profile, 6)
        templates = {n: generate_templates(profile, range(n, n + 1))[n] for n in sizes}
        if not templates:
            continue
        plans = [
            [(rng.choice(sizes), rng.randint(1, 14)) for _ in range(rng.randint(1, 5))]
            for _ in range(4)
        ]
        replay = StepReplay(list(templates.values()), profile)
        times = replay.step_s([tuple(zip(*kinds, strict=True)) for kinds in plans])
        for kinds, time in zip(plans, times, strict=True):
            plan = plan_of(templates, kinds)
            expected = simulate(compile_programs(plan, tied=False), profile, plan=plan)
            assert time == pytest.approx(expected.step_s, rel=1e-9), (seed, kinds)

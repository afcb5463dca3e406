"""Template generation against a dumb search over every cut (Oobleck §4.1.2)."""

import random

import numpy as np
import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import PipelineTemplate
from oobleck.core.profile import LayerProfile, Profile
from oobleck.planner.search.templates import feasible_sizes, generate_templates
from support.cuts import Cut, Shape, iteration_times, least_iteration_s
from support.profiles import LINKS, profile_of, random_profile

#: Of each number of GPUs per node, the most layers and nodes that the oracle can do.
LIMITS = {1: (8, 4), 2: (8, 4), 3: (7, 3), 4: (7, 2), 5: (6, 2), 6: (6, 2)}
CASES = {1: 500, 2: 450, 3: 400, 4: 300, 5: 200, 6: 150}


def any_profile(rng: random.Random, layers: int, gpus_per_node: int) -> Profile:
    """Times with and without ties, good and bad scaling, numbers of GPUs that some layers may not
    have, layers that take no time, and memory from plenty to too little."""
    whole = rng.random() < 0.5
    scaling = rng.choice([1.0, 0.9, 0.5, 0.0])
    allowed = [d for d in range(1, gpus_per_node + 1) if d == 1 or rng.random() < 0.8]
    made = []
    for number in range(layers):
        forward = float(rng.randint(0, 5)) if whole else rng.uniform(0.1, 3.0)
        backward = float(rng.randint(1, 9)) if whole else rng.uniform(0.1, 6.0)
        gpus = [d for d in allowed if d == 1 or rng.random() < 0.9]
        made.append(
            LayerProfile(
                name=f"layer{number}",
                forward_s={d: round(forward / d**scaling, 6) for d in gpus},
                backward_s={d: round(backward / d**scaling, 6) for d in gpus},
                parameter_bytes=1,
                state_bytes=rng.randint(1, 9),
                activation_bytes=rng.randint(0, 3),
                output_bytes=1,
            )
        )
    state = sum(layer.state_bytes for layer in made)
    memory = rng.choice([1 << 40, rng.randint(1, state), state // (2 * gpus_per_node) + 4])
    return Profile(
        microbatch=1,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=memory,
        layers=tuple(made),
        links=LINKS,
    )


def cut_of(template: PipelineTemplate) -> Cut:
    return tuple((s.first_layer, s.last_layer + 1, s.gpus) for s in template.stages)


@pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.soak)])
@pytest.mark.parametrize("gpus_per_node", LIMITS)
def test_templates_are_the_exact_minimum(gpus_per_node: int, share: float) -> None:
    most_layers, most_nodes = LIMITS[gpus_per_node]
    infeasible, cases = 0, round(share * CASES[gpus_per_node])
    for seed in range(cases):
        rng = random.Random(f"{gpus_per_node} {seed}")
        shape = Shape(
            layers=rng.randint(1, most_layers),
            nodes=rng.randint(1, most_nodes),
            gpus_per_node=gpus_per_node,
        )
        profile = any_profile(rng, shape.layers, gpus_per_node)
        expected = least_iteration_s(profile, shape)
        nodes = shape.nodes
        assert (nodes in feasible_sizes(profile, nodes)) == (expected is not None), seed
        if expected is None:
            infeasible += 1
            with pytest.raises(PlanInfeasible):
                generate_templates(profile, range(nodes, nodes + 1))
            continue
        template = generate_templates(profile, range(nodes, nodes + 1))[nodes]
        assert template.iteration_s == pytest.approx(expected, rel=1e-9), seed
        (true,) = iteration_times(profile, np.array([cut_of(template)]))
        assert true == pytest.approx(expected, rel=1e-9), seed
    assert 0.05 < infeasible / cases < 0.8


def test_any_number_of_a_nodes_gpus_may_share_a_stage() -> None:
    """3 + 1 GPUs suit layers of 3 : 1 better than halves do."""
    profile = profile_of([3.0, 1.0], gpus=(1, 2, 3), gpus_per_node=4)
    template = generate_templates(profile, range(1, 2))[1]
    assert cut_of(template) == ((0, 1, 3), (1, 2, 1))


def test_equal_stages_take_the_time_of_one_forward_one_backward() -> None:
    template = generate_templates(profile_of([1.0] * 8), range(4, 5))[4]
    assert template.iteration_s == pytest.approx((16 + 4 - 1) * 6.0)


def test_times_that_are_equal_on_paper_are_equal() -> None:
    """0.1 + 0.2 and 0.3 are one time: the last of the two stages counts as the slowest."""
    profile = profile_of([0.1, 0.2, 0.05, 0.3], state=[500, 500, 2000, 500], memory=2100)
    template = generate_templates(profile, range(3, 4))[3]
    assert cut_of(template) == ((0, 2, 1), (2, 3, 1), (3, 4, 1))
    # t = 0.9, 0.15, 0.9 with k* = 2: T1 + (12 - 3 + 2 - 1) t* + T3
    assert template.iteration_s == pytest.approx(1.95 + 10 * 0.9 + 0.9)


def test_byte_counts_beyond_32_bits() -> None:
    big = 1 << 45
    profile = profile_of([1.0] * 4, state=big, activation=big, memory=7 * big)
    # The first of two stages keeps two micro-batches: 2 layers need 2 + 2 * 2 parts.
    assert feasible_sizes(profile, 4) == (2, 3, 4)
    profile = profile_of([1.0] * 4, state=big, activation=big, memory=5 * big)
    assert feasible_sizes(profile, 4) == (3, 4)


def test_more_nodes_than_layers_fit_nothing() -> None:
    with pytest.raises(PlanInfeasible, match="no template of 4 nodes"):
        generate_templates(profile_of([1.0] * 3), range(4, 5))


def test_templates_do_not_depend_on_what_was_asked_before() -> None:
    profile = random_profile(random.Random(5), layers=9)
    together = generate_templates(profile, range(2, 7))
    assert [generate_templates(profile, range(n, n + 1))[n] for n in range(2, 7)] == list(
        together.values()
    )

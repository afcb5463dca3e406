"""Template generation against a dumb search over every cut (Oobleck §4.1.2)."""

import itertools
import random
from collections.abc import Iterator

import pytest

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.profile import Profile
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.templates import feasible_sizes, generate_templates
from support.profiles import profile_of, random_profile

Cut = tuple[tuple[int, int, int], ...]


def iteration_s(times: list[float], microbatches: int | None = None) -> float:
    """T1 + T2 + T3 as DESIGN and paper write it."""
    stages = len(times)
    batch = 4 * stages if microbatches is None else microbatches
    slowest = max(range(stages), key=lambda s: (times[s], s))
    t1 = sum(times)
    t2 = (batch - stages + slowest - 1) * times[slowest]
    t3 = sum(times[slowest:])
    return t1 + t2 + t3


def all_cuts(profile: Profile, nodes: int) -> Iterator[Cut]:
    """Every way to cut layers and GPUs into stages, fitting or not: (first, stop, gpus)."""
    count, per_node = len(profile.layers), profile.gpus_per_node

    def node_splits(gpus: int) -> Iterator[tuple[int, ...]]:
        if gpus == 0:
            yield ()
        for first in range(1, gpus + 1):
            for rest in node_splits(gpus - first):
                yield (first, *rest)

    for split in itertools.product(list(node_splits(per_node)), repeat=nodes):
        gpus = [d for node in split for d in node]
        if len(gpus) > count:
            continue
        for inner in itertools.combinations(range(1, count), len(gpus) - 1):
            ends = (0, *inner, count)
            yield tuple((ends[i], ends[i + 1], d) for i, d in enumerate(gpus))


def fits(profile: Profile, cut: Cut) -> bool:
    for number, (first, stop, gpus) in enumerate(cut):
        layers = profile.layers[first:stop]
        if any(gpus not in layer.forward_s for layer in layers):
            return False
        kept = (len(cut) - number) * sum(layer.activation_bytes for layer in layers)
        if sum(layer.state_bytes for layer in layers) + kept > profile.gpu_memory_bytes * gpus:
            return False
    return True


def stage_times(profile: Profile, cut: Cut) -> list[float]:
    # Rounded, so that stages that are equal on paper are equal here too.
    return [
        round(sum(la.forward_s[d] + la.backward_s[d] for la in profile.layers[first:stop]), 9)
        for first, stop, d in cut
    ]


def brute_force(profile: Profile, nodes: int) -> float | None:
    costs = [
        iteration_s(stage_times(profile, cut))
        for cut in all_cuts(profile, nodes)
        if fits(profile, cut)
    ]
    return min(costs, default=None)


def cut_of(template: PipelineTemplate) -> Cut:
    return tuple((s.first_layer, s.last_layer + 1, s.gpus) for s in template.stages)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("gpus_per_node", [1, 2, 3])
def test_templates_are_the_exact_minimum(seed: int, tight: bool, gpus_per_node: int) -> None:
    rng = random.Random(f"{seed} {tight} {gpus_per_node}")
    for _ in range(10 if gpus_per_node < 3 else 4):
        layers = rng.randint(1, 8 if gpus_per_node == 1 else 6)
        profile = random_profile(rng, layers=layers, gpus_per_node=gpus_per_node, tight=tight)
        fitting = []
        for nodes in range(1, min(layers, 6 if gpus_per_node == 1 else 2) + 1):
            expected = brute_force(profile, nodes)
            if expected is None:
                with pytest.raises(PlanInfeasible):
                    generate_templates(profile, range(nodes, nodes + 1))
                continue
            fitting.append(nodes)
            template = generate_templates(profile, range(nodes, nodes + 1))[nodes]
            cut = cut_of(template)
            assert fits(profile, cut), profile
            assert template.iteration_s == pytest.approx(expected, rel=1e-9), profile
            assert iteration_s(stage_times(profile, cut)) == pytest.approx(expected), profile
        most = max(fitting, default=0)
        assert [n for n in feasible_sizes(profile, layers) if n <= most] == fitting


def test_equal_stages_take_the_time_of_one_forward_one_backward() -> None:
    template = generate_templates(profile_of([1.0] * 8), range(4, 5))[4]
    assert template.iteration_s == pytest.approx((16 + 4 - 1) * 6.0)


def test_times_that_are_equal_on_paper_are_equal() -> None:
    """0.1 + 0.2 and 0.3 are one time: the last of the two stages counts as the slowest."""
    profile = profile_of([0.1, 0.2, 0.05, 0.3], state=[500, 500, 2000, 500], memory=2100)
    template = generate_templates(profile, range(3, 4))[3]
    assert cut_of(template) == ((0, 2, 1), (2, 3, 1), (3, 4, 1))
    assert template.iteration_s == pytest.approx(iteration_s([0.9, 0.15, 0.9]))


def test_more_nodes_than_layers_fit_nothing() -> None:
    with pytest.raises(PlanInfeasible, match="no template of 4 nodes"):
        generate_templates(profile_of([1.0] * 3), range(4, 5))


def test_templates_do_not_depend_on_what_was_asked_before() -> None:
    profile = random_profile(random.Random(5), layers=9)
    together = generate_templates(profile, range(2, 7))
    assert [generate_templates(profile, range(n, n + 1))[n] for n in range(2, 7)] == list(
        together.values()
    )

"""Steps under rates take as long as in a profile whose slow workers' layers are slower."""

import random
from dataclasses import replace

import pytest

from oobleck.core.ids import Generation
from oobleck.core.profile import LayerProfile, Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.recovery.reroute import reroute
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of


def costs(layers: int, rng: random.Random) -> Profile:
    found = profile_of([rng.uniform(1, 3) for _ in range(layers)], gpus=(1, 2), gpus_per_node=2)
    return replace(
        found,
        layers=tuple(replace(la, update_s=dict.fromkeys((1, 2), 0.5)) for la in found.layers),
    )


def slowed(profile: Profile, layers: range, rate: float) -> Profile:
    """Where these layers take longer, whoever computes them."""

    def one(number: int, layer: LayerProfile) -> LayerProfile:
        if number not in layers:
            return layer
        return replace(
            layer,
            forward_s={d: t / rate for d, t in layer.forward_s.items()},
            backward_s={d: t / rate for d, t in layer.backward_s.items()},
            update_s={d: t / rate for d, t in layer.update_s.items()},
        )

    return replace(profile, layers=tuple(one(n, la) for n, la in enumerate(profile.layers)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_is_as_slow_as_its_slowest_worker(schedule: Schedule) -> None:
    profile = costs(6, random.Random(1))
    plan = plan_of_cuts(([2, (2, 2), 2], 7), schedule=schedule)
    slow = plan.with_rates({worker(1, 1): 0.5, worker(1, 0): 0.75})
    expected = estimate_step(plan, slowed(profile, range(2, 4), 0.5)).step_s
    assert estimate_step(slow, profile).step_s == pytest.approx(expected)
    assert expected > 1.1 * estimate_step(plan, profile).step_s


def test_pipelines_with_other_rates_are_of_another_kind() -> None:
    profile = costs(6, random.Random(2))
    plan = plan_of_cuts(([3, 3], 4), ([3, 3], 4)).with_rates({worker(3): 0.5})
    found = estimate_step(plan, profile)
    assert [kind.numbers for kind in found.kinds] == [(0,), (1,)]
    alone = estimate_step(plan_of_cuts(([3, 3], 4)), slowed(profile, range(3, 6), 0.5))
    assert found.kinds[1].computed_s == pytest.approx(alone.kinds[0].computed_s)


@pytest.mark.parametrize("split", [False, True])
def test_listings_count_rates(split: bool) -> None:
    """One pipeline has lost its first stage; all that hold the layers are as slow."""
    profile = costs(6, random.Random(3))
    whole = plan_of_cuts(([3, 3], 4), ([3, 3], 4))
    plan = reroute(whole, [worker(0)], generation=Generation(2))
    slow = with_listing(plan.with_rates({worker(2): 0.25}), profile, split=split)
    other = with_listing(plan, slowed(profile, range(3), 0.25), split=split)
    assert slow.listing is not None
    assert slow.listing == other.listing
    expected = estimate_listed(other, slowed(profile, range(3), 0.25), tied=False)
    assert estimate_listed(slow, profile, tied=False).step_s == pytest.approx(expected.step_s)

"""Steps of re-routed plans that are extrapolated from short schedules: against whole ones."""

import random
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.planner.cost.estimate import peak_bytes
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.planner.programs.listing import schedule
from oobleck.planner.programs.listing.schedule import foreseen, listed_routes, planned
from oobleck.planner.recovery.reroute import reroute
from support.plans import plan_of_cuts
from support.profiles import LINKS, profile_of


def random_long(rng: random.Random) -> Iterator[tuple[Plan, Profile]]:
    """Without end: pipelines cut alike or not, around a loss or two, by some helpers or all."""
    while True:
        layers, microbatches = rng.randint(4, 16), rng.randint(60, 240)
        alike, cuts = rng.random() < 0.6, []
        for _ in range(rng.randint(2, 5)):
            if not cuts or not alike:
                inner = rng.sample(range(1, layers), rng.randint(1, min(7, layers - 1)))
                cut = [b - a for a, b in pairwise([0, *sorted(inner), layers])]
            cuts.append((cut, microbatches + rng.randint(-3, 3)))
        base = plan_of_cuts(*cuts)
        times = [rng.choice((0.01, 0.01, rng.uniform(0.005, 0.02))) for _ in range(layers)]
        profile = profile_of(times, activation=100)
        profile = replace(profile, links=replace(LINKS, latency_s=rng.choice((1e-5, 1e-5, 1e-3))))
        room = peak_bytes(base, profile) + rng.choice((0, 100, 1_000, 100_000))
        profile = replace(profile, gpu_memory_bytes=room)
        lost = rng.sample(base.workers, rng.choice((1, 1, 1, 2)))
        try:
            plan = reroute(base, lost, generation=Generation(2), helpers=rng.choice((None, 1, 2)))
            plan = with_listing(plan, profile)
            if listed_routes(plan) and is_long(plan):
                yield plan, profile
        except PlanInfeasible:
            continue


def is_long(plan: Plan) -> bool:
    """Whether its time is extrapolated, and its whole schedule takes no seconds."""
    count = sum(plan.routes[n].microbatches * len(plan.routes[n].hops) for n in listed_routes(plan))
    exact = foreseen(plan) == schedule._exactly(*schedule._asked(plan))  # type: ignore[misc]
    return count < 8_000 and not exact


def step_s(plan: Plan, profile: Profile, monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> float:
    with monkeypatch.context() as patch:
        if whole:
            patch.setattr(schedule, "_foreseen", schedule._exactly)
        return estimate_listed(plan, profile, tied=False).step_s


@pytest.mark.parametrize("count", [15, pytest.param(100, marks=pytest.mark.soak)])
def test_a_long_step_is_known_from_short_ones(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the times of all visits in the order in which workers compute them."""
    errors = []
    for plan, profile in islice(random_long(random.Random(1)), count):
        found, true = (step_s(plan, profile, monkeypatch, whole=w) for w in (False, True))
        errors.append(found / true - 1)
    assert statistics.median(map(abs, errors)) < 0.002
    assert max(errors) < 0.03
    assert min(errors) > -0.02


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(each, marks=pytest.mark.soak) for each in range(4, 10))]
)
def test_all_that_was_not_scheduled_is_bounded_and_runs(seed: int) -> None:
    """No worker keeps more bytes than expected, and no program waits for ever."""
    plan, _ = next(random_long(random.Random(seed)))
    expected, true = foreseen(plan), planned(plan)
    assert expected is not None
    assert true is not None
    assert expected.ends.keys() == true.ends.keys() == true.peak_bytes.keys()
    assert all(true.peak_bytes[w] <= most for w, most in expected.peak_bytes.items())
    dry_run(compile_programs(plan, tied=False), plan)

"""Re-routed plans for tests, at random: pipelines with other cuts each lose a worker or two."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.planner.cost.estimate import peak_bytes
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.reroute import reroute
from support.plans import plan_of_cuts
from support.profiles import profile_of


def random_rerouted(
    rng: random.Random, *, layers: int, stages: int
) -> Iterator[tuple[Plan, Plan, Profile]]:
    """Without end: pipelines of up to so many stages, the plan around those lost, which has a
    listing, and a profile whose memory holds both and may hold a little more."""
    while True:
        count = rng.randint(3, layers)
        microbatches, cuts = rng.randint(2, 12), []
        for _ in range(rng.choice((2, 2, 3))):
            borders = sorted(rng.sample(range(1, count), rng.randint(2, min(stages, count)) - 1))
            cuts.append(([b - a for a, b in pairwise([0, *borders, count])], microbatches))
        base = plan_of_cuts(*cuts)
        profile = profile_of(
            [1.0] * count,
            state=[rng.randint(5, 15) for _ in range(count)],
            activation=rng.randint(1, 8),
        )
        room = peak_bytes(base, profile) + rng.randint(0, 15)
        profile = replace(profile, gpu_memory_bytes=room)
        lost = rng.sample(base.workers, rng.choice((1, 1, 2)))
        try:
            plan = reroute(base, lost, generation=Generation(2))
            if not listed_routes(plan):
                continue
            plan = with_listing(plan, profile)
            needed = estimate_listed(plan, profile, tied=False).peak_bytes
        except PlanInfeasible:
            continue
        if needed <= room:
            yield base, plan, profile

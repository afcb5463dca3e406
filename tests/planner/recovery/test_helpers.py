"""Who takes the micro-batches of a lost worker: against all ways to spread them."""

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Route
from oobleck.planner.cost.estimate import peak_bytes
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery import worth
from oobleck.planner.recovery.answer import Change, situation
from oobleck.planner.recovery.reroute import merged, reroute
from oobleck.planner.recovery.uneven.candidates import scheduled
from oobleck.planner.recovery.worth import by_reroute, splitting_weight
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of
from support.routes import equal_pipelines


def loss_of(lost: NodeName, plan: Plan, profile: Profile) -> Change:
    return Change(
        plan=plan,
        base=plan,
        live=tuple(node for node in plan.nodes if node != lost),
        generation=Generation(2),
        templates={},
        profile=profile,
        fault_tolerance=1,
        tied=False,
    )


def random_loss(rng: random.Random) -> Change:
    """Three pipelines of two or three stages, of which one loses a node."""
    stages = rng.randint(2, 3)
    layers = stages + rng.randint(0, 3)
    borders = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    cut, most = [b - a for a, b in pairwise(borders)], rng.randint(3, 5)
    plan = plan_of_cuts(*((cut, max(2, most + rng.randint(-1, 1))) for _ in range(3)))
    times = [rng.choice((0.01, 0.01, rng.uniform(0.005, 0.02))) for _ in range(layers)]
    profile = profile_of(times, activation=10)
    room = peak_bytes(plan, profile) + rng.choice((0, 20, 1000))
    return loss_of(rng.choice(plan.nodes), plan, replace(profile, gpu_memory_bytes=room))


def every_spread(asked: Change, most: int) -> Iterator[Plan]:
    """All ways to give the lost worker's micro-batches to its peers, at most so many of them, or
    whole to other pipelines."""
    plan = asked.plan
    gone = {worker for worker in plan.workers if worker.node not in asked.live}
    hit = next(r for r in plan.routes if any(not gone.isdisjoint(h.workers) for h in r.hops))
    others = [route for route in plan.routes if route is not hit]
    ways = [
        merged(
            own if gone.intersection(had.workers) else had
            for had, own in zip(hit.hops, other.hops, strict=True)
        )
        for other in others
    ]
    ways += [route.hops for route in others]
    holds = tuple(hold for hold in plan.holds if gone.isdisjoint(hold.workers))
    for taken in combinations_with_replacement(range(len(ways)), hit.microbatches):
        if len({number for number in taken if number < len(others)}) <= most:
            counts = Counter({route.hops: route.microbatches for route in others})
            counts.update(ways[number] for number in taken)
            routes = tuple(Route(hops=hops, microbatches=n) for hops, n in counts.items())
            yield Plan(generation=asked.generation, holds=holds, routes=routes)


def least_s(asked: Change, most: int) -> float:
    found = []
    for plan in every_spread(asked, most):
        try:
            made, step_s = scheduled(plan, situation(asked))
        except PlanInfeasible:
            continue
        found.append(step_s * splitting_weight(made))
    return min(found)


@pytest.mark.parametrize("cases", [4, pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.parametrize("most", [2, 1])
def test_the_spread_is_the_best_of_all(
    most: int, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most`: so many peers may help. Splitting the backward counts as in the choice."""
    if most == 1:
        monkeypatch.setattr(worth, "_helpers", lambda plan: [(1, 1), (1, 3), (0, 3)])
    rng, ratios = random.Random(5), []
    for _ in range(cases):
        asked = random_loss(rng)
        made = by_reroute(asked)
        ratios.append(made.step_s * splitting_weight(made.found.plan) / least_s(asked, most))
    assert statistics.mean(ratios) < 1.01
    assert max(ratios) < 1.05


def large_loss(pipelines: int, microbatches: int, *, stage: int) -> Change:
    """Pipelines of two equal stages and a light one, of which the first loses a stage."""
    plan = plan_of_cuts(*(([1, 1, 1], microbatches) for _ in range(pipelines)))
    profile = replace(profile_of([0.03, 0.03, 0.01], activation=10), gpu_memory_bytes=10**12)
    return loss_of(plan.pipelines[0].nodes[stage], plan, profile)


@pytest.mark.parametrize(
    ("pipelines", "microbatches", "stage", "helped"),
    [(3, 2400, 2, True), (3, 2400, 0, False), (80, 100, 2, False)],
)
def test_in_a_large_plan_peers_help_where_that_promises_enough(
    pipelines: int,
    microbatches: int,
    stage: int,
    helped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only two pipelines with time to spare at the light stage promise it. Of 80, each takes a
    micro-batch or two more, so that no re-route with helpers is made."""
    asked = large_loss(pipelines, microbatches, stage=stage)
    tried: list[int | None] = []

    def counted(*args: Any, helpers: int | None, **options: Any) -> Plan:
        tried.append(helpers)
        return reroute(*args, helpers=helpers, **options)

    monkeypatch.setattr(worth, "reroute", counted)
    made = by_reroute(asked)
    assert any(tried) == (pipelines == 3)
    assert bool(listed_routes(made.found.plan)) == helped
    monkeypatch.setattr(worth, "_LARGE_VISITS", math.inf)
    assert made.step_s <= by_reroute(asked).step_s * 1.001


def test_in_a_large_plan_workers_without_work_fill_the_next_hole() -> None:
    """The rest of a pipeline whose micro-batches went elsewhere whole: its loss and the next one
    leave as many whole routes as one loss."""
    asked = large_loss(80, 100, stage=0)
    first = by_reroute(asked).found.plan
    live = [node for node in asked.live if node != asked.plan.pipelines[1].nodes[1]]
    second = by_reroute(replace(asked, plan=first, live=tuple(live))).found.plan
    assert len(first.routes) == len(second.routes) == 79
    assert not listed_routes(second)


@pytest.mark.parametrize("helpers", [0, 1, 3, 9])
def test_all_workers_of_equal_pipelines_end_together(helpers: int) -> None:
    """Nine pipelines of three stages share the micro-batches of a tenth, however many help."""
    plan = reroute(
        equal_pipelines(10, 3, 9),
        [worker(4)],
        generation=Generation(2),
        helpers=helpers,
        waits=1,
    )
    load: Counter[WorkerId] = Counter()
    for route in plan.routes:
        for hop in route.hops:
            load[hop.workers[0]] += route.microbatches
    assert max(load.values()) == 10
    assert plan.microbatches == 90
    assert len(plan.meeting_routes) <= 2 * helpers

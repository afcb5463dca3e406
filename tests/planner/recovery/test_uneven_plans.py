"""Shares, cuts and ways around slow workers against all that there are, and over random plans."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from msgspec import structs

from oobleck.core.codec import encode
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import LayerLost
from oobleck.core.schedules import SCHEDULES
from oobleck.planner.cost.estimate import estimate_step, peak_bytes
from oobleck.planner.cost.listed import estimate_listed
from oobleck.planner.cost.stages import stage_cost
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.answer import Situation
from oobleck.planner.recovery.reroute import reroute
from oobleck.planner.recovery.uneven.candidates import around, candidates, hop_ticks, staying_s
from oobleck.planner.recovery.uneven.cuts import recut, reshared
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of
from support.routes import random_pipelines


def random_rates(draw: random.Random, plan: Plan) -> dict[WorkerId, float]:
    slow = draw.sample(plan.workers, draw.randint(1, min(3, len(plan.workers))))
    return {one: draw.choice((0.1, 0.25, 0.5, 0.5, 0.8)) for one in slow}


def random_costs(draw: random.Random, layers: int, **more: int) -> Profile:
    times = [draw.uniform(1, 3) for _ in range(layers)]
    return profile_of(times, gpus=(1, 2, 3), gpus_per_node=3, activation=100, **more)


def computed_s(plan: Plan, profile: Profile) -> float:
    """When the last pipeline has computed."""
    return max(max(kind.computed_s) for kind in estimate_step(plan, profile).kinds)


def with_shares(plan: Plan, shares: list[int]) -> Plan:
    routes = zip(plan.routes, shares, strict=True)
    return replace(plan, routes=tuple(structs.replace(r, microbatches=n) for r, n in routes))


def all_shares(total: int, parts: int) -> Iterator[list[int]]:
    for borders in combinations(range(1, total), parts - 1):
        yield [after - before for before, after in pairwise([0, *borders, total])]


@pytest.mark.parametrize("seed", range(8))
def test_no_shares_are_computed_sooner(seed: int) -> None:
    draw = random.Random(seed)
    plan = replace(random_pipelines(draw), schedule=draw.choice(SCHEDULES))
    plan = plan.with_rates(random_rates(draw, plan))
    profile = random_costs(draw, plan.layer_count)
    shares = all_shares(plan.microbatches, len(plan.routes))
    least = min(computed_s(with_shares(plan, one), profile) for one in shares)
    found = reshared(plan, profile)
    assert found.microbatches == plan.microbatches
    assert computed_s(found, profile) == pytest.approx(least)


def slowest_s(pipeline: Pipeline, plan: Plan, profile: Profile) -> float:
    return max(
        (cost.forward_s + cost.backward_s) / plan.rate(stage.workers)
        for stage in pipeline.stages
        for cost in [stage_cost(profile, stage.first_layer, stage.last_layer, len(stage.workers))]
    )


def all_cuts(pipeline: Pipeline, layers: int) -> Iterator[Pipeline]:
    for borders in combinations(range(1, layers), len(pipeline.stages) - 1):
        edges = pairwise([0, *borders, layers])
        stages = (
            structs.replace(stage, first_layer=first, last_layer=stop - 1)
            for stage, (first, stop) in zip(pipeline.stages, edges, strict=True)
        )
        yield replace(pipeline, stages=tuple(stages))


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_that_fits_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    cuts = random.Random(seed).choice(([2, 2, 3], [(3, 2), 4], [1, 2, (2, 2), 2], [7]))
    plan = plan_of_cuts((cuts, 6), (cuts, 6))
    plan = plan.with_rates(random_rates(draw, plan))
    profile = random_costs(draw, 7)
    room = peak_bytes(plan, profile)
    profile = replace(profile, gpu_memory_bytes=room + draw.choice((0, 500, 1500, 10_000)))
    found = recut(plan, profile)
    assert peak_bytes(found, profile) <= profile.gpu_memory_bytes
    for number, before in enumerate(plan.pipelines):
        fitting = [
            one
            for one in all_cuts(before, 7)
            if peak_bytes(_with_pipeline(plan, number, one), profile) <= profile.gpu_memory_bytes
        ]
        least = min(slowest_s(one, plan, profile) for one in fitting)
        close = [one for one in fitting if slowest_s(one, plan, profile) <= least * 1.01]
        taken = found.pipelines[number]
        assert slowest_s(taken, plan, profile) <= least * 1.01
        assert moved_layers(before, taken) == min(moved_layers(before, one) for one in close)


def test_who_holds_layers_and_runs_none_has_no_part_in_another_cut() -> None:
    """However slow it is."""
    plan = plan_of_cuts(([2, 2], 4), ([4], 4))
    plan = replace(plan, routes=plan.routes[:1])
    profile = profile_of([1.0] * 4, activation=100)
    for rates in ({worker(0): 0.5}, {worker(0): 0.5, worker(2): 0.25}):
        found = recut(plan.with_rates(rates), profile)
        assert [len(stage.layers) for stage in found.pipelines[0].stages] == [1, 3]
        assert found.workers == (worker(0), worker(1))
        assert [(one.worker, one.rate) for one in found.rates] == [(worker(0), 0.5)]


def _with_pipeline(plan: Plan, number: int, pipeline: Pipeline) -> Plan:
    pipelines = [*plan.pipelines[:number], pipeline, *plan.pipelines[number + 1 :]]
    return Plan.of_pipelines(pipelines, generation=plan.generation)


def moved_layers(before: Pipeline, after: Pipeline) -> int:
    """All have the same bytes."""
    pairs = zip(before.stages, after.stages, strict=True)
    return sum(len(set(new.layers) - set(old.layers)) for old, new in pairs)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_each_move_lessens_the_busiest_and_slow_workers_keep_some(seed: int, whole: bool) -> None:
    draw = random.Random(seed)
    plan = random_pipelines(draw)
    plan = plan.with_rates(random_rates(draw, plan))
    profile = random_costs(draw, plan.layer_count)
    ticks = hop_ticks(profile, plan)

    def loads(of: Plan) -> Counter[WorkerId]:
        found: Counter[WorkerId] = Counter()
        for route in of.routes:
            for hop in route.hops:
                for one in hop.workers:
                    found[one] += route.microbatches * ticks(hop)
        return found

    parts = [part / 20 for part in range(1, 21)]
    most = max(loads(plan).values())
    for found in around(plan, ticks, whole=whole, parts=parts):
        assert found.microbatches == plan.microbatches
        assert found.holds == plan.holds
        load = loads(found)
        assert max(load.values()) <= most
        most = max(load.values())
        assert all(load[one.worker] for one in plan.rates)


@pytest.mark.parametrize("seed", range(10))
def test_candidates_of_random_plans_run_and_the_best_is_no_worse_than_staying(seed: int) -> None:
    draw = random.Random(seed)
    base = running = random_pipelines(draw)
    if draw.random() < 0.4:
        with contextlib.suppress(LayerLost, PlanInfeasible):
            running = reroute(base, draw.sample(base.workers, 1), generation=Generation(2))
    profile = random_costs(draw, base.layer_count, memory=10_000)
    now = Situation(
        running=running,
        base=base,
        rates=random_rates(draw, running),
        profile=profile,
        tied=False,
    )
    found = list(candidates(now))
    if running is base:
        assert min(each.step_s for each in found) <= staying_s(now) * (1 + 1e-9)
    for each in found:
        assert each.plan.microbatches == running.microbatches
        assert each.plan.workers == running.workers
        assert {one.worker: one.rate for one in each.plan.rates} == dict(sorted(now.rates.items()))
        programs = compile_programs(each.plan, tied=False)
        dry_run(programs, each.plan)
        if listed_routes(each.plan):
            assert estimate_listed(each.plan, profile, tied=False).peak_bytes <= 10_000
        else:
            assert peak_bytes(each.plan, profile) <= 10_000
        if each.rule != "recut":
            assert each.plan.shards == running.shards
    assert [encode(each) for each in candidates(now)] == [encode(each) for each in found]


def test_a_worker_that_is_hardly_of_use_keeps_one_microbatch() -> None:
    plan = plan_of_cuts(([2, 2], 4), ([2, 2], 4))
    plan = plan.with_rates({worker(1): 0.01})
    ticks = hop_ticks(profile_of([1.0] * 4), plan)
    *_, last = around(plan, ticks, whole=False, parts=(1.0,))
    hops = [(r.microbatches, h) for r in last.routes for h in r.hops if worker(1) in h.workers]
    assert [count for count, _ in hops] == [1]

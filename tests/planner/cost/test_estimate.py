"""What a step takes: by hand, and as all programs of the plan give it, worker by worker."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import Plan
from oobleck.core.profile import Links, Profile
from oobleck.core.schedules import Schedule
from oobleck.planner.cost.estimate import estimate_step, worker_peak_bytes
from oobleck.planner.cost.kinds import pipeline_kinds
from oobleck.planner.cost.stages import StageTable, pipeline_cost, seconds
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.search.choose import choose_schedule, keep_schedule
from oobleck.planner.search.templates import generate_templates
from support.clocked import run_clocked
from support.plans import plan_of_cuts, plan_of_templates, worker
from support.profiles import profile_of, random_profile

INSTANT = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=1e18, latency_s=0.0)
SLOW = Links(intra_node_bytes_per_s=1e4, inter_node_bytes_per_s=300.0, latency_s=0.01)


def random_plan(rng: random.Random, layers: int, widths: range) -> Plan:
    """Pipelines of a few kinds, each some times."""
    pipelines = []
    for _ in range(rng.randint(1, 3)):
        cuts = sorted(rng.sample(range(1, layers), rng.randint(0, min(4, layers - 1))))
        gpus = rng.choice(widths)
        kind = [(b - a, gpus) for a, b in pairwise([0, *cuts, layers])]
        pipelines += [(kind, rng.randint(1, 9))] * rng.randint(1, 3)
    rng.shuffle(pipelines)
    return plan_of_cuts(*pipelines)


def random_costs(rng: random.Random, layers: int) -> Profile:
    profile = profile_of(
        [rng.uniform(0.5, 3.0) for _ in range(layers)],
        gpus=(1, 2),
        gpus_per_node=2,
        state=[rng.randint(100, 4000) for _ in range(layers)],
        activation=[rng.randint(0, 50) for _ in range(layers)],
        links=SLOW,
    )
    changed = []
    for layer in profile.layers:
        share, update_s = rng.uniform(0.3, 0.9), rng.uniform(0, 1)
        changed.append(
            replace(
                layer,
                backward_input_s={d: share * t for d, t in layer.backward_s.items()},
                update_s=dict.fromkeys(layer.forward_s, update_s),
            )
        )
    return replace(profile, layers=tuple(changed))


def test_equal_stages_take_the_textbook_time() -> None:
    profile = profile_of([1.0] * 4, links=INSTANT)
    plan = plan_of_templates(generate_templates(profile, range(4, 5)), (4, 6))
    result = estimate_step(plan, profile, tied=False)
    assert result.step_s == pytest.approx((6 + 4 - 1) * 3.0)
    assert result.bubble == pytest.approx(3 / 9)
    assert result.kinds[0].busy_s == pytest.approx([6 * 3.0] * 4)


def test_peak_memory_counts_the_microbatches_in_flight() -> None:
    profile = profile_of([1.0] * 3, state=1000, activation=[1, 10, 100])
    plan = plan_of_templates(generate_templates(profile, range(3, 4)), (3, 8))
    assert list(worker_peak_bytes(plan, profile).values()) == [1003, 1020, 1100]


def test_what_the_heap_keeps_of_one_layer_is_beside_what_is_mapped_for_another() -> None:
    base = profile_of([1.0] * 3, state=1000, activation=[0, 0, 0])
    both = ((30, 0), (10, 500), (20, 100))
    layers = tuple(
        replace(layer, working_bytes=working, mapped_bytes=mapped)
        for layer, (working, mapped) in zip(base.layers, both, strict=True)
    )
    plan = plan_of_cuts(([1, 2], 1), ([3], 1))
    profile = replace(base, layers=layers)
    assert list(worker_peak_bytes(plan, profile).values()) == [1030, 2520, 3530]
    for memory, fits in ((3530, True), (3529, False)):
        table = StageTable(replace(profile, gpu_memory_bytes=memory))
        assert table.fits(((0, 3, 1),)) == fits


def test_a_shared_weight_is_summed_in_every_plan_and_once_on_each_worker() -> None:
    base = profile_of([1.0] * 3, state=1000, activation=[0, 0, 0])
    ends = {0: 70, 1: 0, 2: 70}
    layers = tuple(
        replace(layer, sum_bytes=100, tied_bytes=ends[number])
        for number, layer in enumerate(base.layers)
    )
    profile = replace(base, layers=layers)
    for cuts, expected in (
        ([([1, 1, 1], 2)], [1070, 1000, 1070]),
        ([([3], 2)], [3070]),
        # Elsewhere there are copies: all is summed, and of the two places of the weight one.
        ([([1, 2], 1), ([3], 1)], [1100, 2200, 3230]),
    ):
        plan = plan_of_cuts(*cuts)
        assert list(worker_peak_bytes(plan, profile).values()) == expected
        kinds = estimate_step(plan, profile, tied=True).kinds
        assert [peak for kind in kinds for peak in kind.peak_bytes] == expected


def test_messages_and_sums_take_their_time() -> None:
    links = Links(intra_node_bytes_per_s=1e9, inter_node_bytes_per_s=100.0, latency_s=0.5)
    profile = profile_of([1.0, 1.0], state=4000, links=links)
    plan = plan_of_templates(generate_templates(profile, range(1, 3)), (2, 1), (2, 1))
    result = estimate_step(plan, profile, tied=False)
    compute, message, gradient, vote = 6.0, 0.5 + 1.0, 2 * (0.5 + 500 / 100), 6 * (0.5 + 16 / 100)
    assert result.step_s == pytest.approx(compute + 2 * message + gradient + vote)


def test_the_optimizer_takes_its_time_on_each_worker() -> None:
    profile = profile_of([1.0, 1.0, 1.0], links=INSTANT)
    updated = tuple(
        replace(layer, update_s={1: seconds_})
        for layer, seconds_ in zip(profile.layers, (0.25, 0.5, 0.125), strict=True)
    )
    plan = plan_of_cuts(([2, 1], 1))
    run = estimate_step(plan, replace(profile, layers=updated), tied=False)
    assert run.step_s == pytest.approx(9 + 0.75)
    assert run.bubble == pytest.approx(1 - (6 + 0.75 + 3 + 0.125) / (2 * 9.75))


def test_the_tied_weight_travels_once_and_to_all_its_holders() -> None:
    """Two pipelines of 2 stages: the head's parameters (250) are tied but for nothing, those of
    the embedding (300) but for 50."""
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = replace(profile_of([0.0] * 3, state=[1200, 400, 1000], links=links))
    plan = plan_of_cuts(([2, 1], 1), ([2, 1], 1))
    times = {tied: estimate_step(plan, profile, tied=tied).step_s for tied in (False, True)}
    ways, vote = 2 * 1.0, 6 * 16 / 100
    assert times[False] == pytest.approx(ways + 2 * (300 + 100) / 2 / 100 + vote)
    # 250 bytes over the four ends, then 50 and layer 1's 100 over the two first stages.
    assert times[True] == pytest.approx(ways + 6 * 250 / 4 / 100 + 2 * 150 / 2 / 100 + vote)


def test_workers_of_a_stage_share_bytes_and_memory() -> None:
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = profile_of([1.0, 1.0], gpus=(1, 2), gpus_per_node=2, links=links)
    plan = plan_of_cuts(([(1, 2), (1, 1)], 1))
    run = estimate_step(plan, profile, tied=False)
    halved = (1 + 2) / 2**0.9
    # Each half of the rows takes half a second.
    assert run.step_s == pytest.approx(halved + 0.5 + 3 + 0.5 + 2 * 2 * 64 / 3 / 100)
    assert worker_peak_bytes(plan, profile) == {
        worker(0, 0): 505,
        worker(0, 1): 505,
        worker(1): 1010,
    }


def test_pieces_of_a_layer_are_summed_side_by_side() -> None:
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = profile_of([0.0], gpus=(1, 2), gpus_per_node=2, state=4000, links=links)
    plan = plan_of_cuts(([(1, 2)], 1), ([(1, 1)], 1))
    run = estimate_step(plan, profile, tied=False)
    # The one worker sums both halves, one after the other; each of the two its own.
    assert run.step_s == pytest.approx(2 * (2 * 500 / 2 / 100) + 4 * 64 / 3 / 100)


@pytest.mark.parametrize("seed", range(20))
def test_the_formula_of_planning_is_close_to_the_replay(seed: int) -> None:
    rng = random.Random(seed)
    profile = replace(
        random_profile(rng, layers=10),
        links=Links(intra_node_bytes_per_s=1e3, inter_node_bytes_per_s=1e3, latency_s=0.01),
    )
    size = rng.randint(1, 6)
    templates = generate_templates(profile, range(size, size + 1))
    for microbatches in (1, 2, size, 3 * size, 40):
        plan = plan_of_templates(templates, (size, microbatches))
        run = estimate_step(plan, profile, tied=False).step_s
        formula = seconds(pipeline_cost(templates[size], profile).time(microbatches))
        # The formula leaves out that short stages make up for part of the first round trip.
        assert 0.99 * run <= formula <= 1.25 * run


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_equals_the_run_of_all_programs(schedule: Schedule, tied: bool) -> None:
    rng = random.Random(f"{schedule} {tied}")
    for _ in range(40):
        layers = rng.randint(2, 8)
        profile = random_costs(rng, layers)
        plan = replace(random_plan(rng, layers, range(1, 3)), schedule=schedule)
        run = run_clocked(compile_programs(plan, tied=tied), profile, plan=plan)
        estimate = estimate_step(plan, profile, tied=tied)
        assert estimate.step_s == pytest.approx(run.step_s, rel=1e-9)
        assert estimate.bubble == pytest.approx(run.bubble, abs=1e-9)
        assert estimate.peak_bytes == max(run.peak_bytes.values())
        assert sum(kind.count for kind in estimate.kinds) == len(plan.pipelines)
        for kind in estimate.kinds:
            for position, stage in enumerate(kind.pipeline.stages):
                for member in stage.workers:
                    assert kind.computed_s[position] == pytest.approx(run.computed_s[member])
                    assert kind.busy_s[position] + profile_update(
                        profile, stage.layers, len(stage.workers)
                    ) == pytest.approx(run.busy_s[member])
                    assert kind.peak_bytes[position] == run.peak_bytes[member]


def profile_update(profile: Profile, layers: range, gpus: int) -> float:
    return sum(profile.layers[layer].update_s[gpus] for layer in layers)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_neighbours_of_different_widths_too(schedule: Schedule) -> None:
    rng = random.Random(1)
    for _ in range(40):
        profile = random_costs(rng, 5)
        cut = [(1, rng.randint(1, 2)) for _ in range(5)]
        plan = plan_of_cuts((cut, rng.randint(1, 9)), schedule=schedule)
        run = run_clocked(compile_programs(plan, tied=False), profile, plan=plan)
        assert estimate_step(plan, profile).step_s == pytest.approx(run.step_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_many_microbatches_are_extrapolated(schedule: Schedule) -> None:
    rng = random.Random(schedule)
    for _ in range(2):
        profile = random_costs(rng, 6)
        plan = plan_of_cuts(([1, 2, 1, 2], 600), schedule=schedule)
        run = run_clocked(compile_programs(plan, tied=False), profile, plan=plan)
        estimate = estimate_step(plan, profile)
        assert estimate.step_s == pytest.approx(run.step_s, rel=2e-3)
        assert estimate.peak_bytes == max(run.peak_bytes.values())


def test_kinds_are_told_apart_by_cut_width_and_share() -> None:
    plan = plan_of_cuts(([2, 1], 3), ([1, 2], 3), ([2, 1], 3), ([2, 1], 4), ([(2, 2), 1], 3))
    assert list(pipeline_kinds(plan).values()) == [(0, 2), (1,), (3,), (4,)]


def memory_profile(activation: int, memory: int) -> Profile:
    return profile_of([1.0] * 4, state=1000, activation=activation, memory=memory, links=INSTANT)


def test_the_fastest_schedule_that_fits_is_chosen() -> None:
    plan = plan_of_cuts(([1, 1, 1, 1], 8))
    choice = choose_schedule(plan, memory_profile(10, 2000))
    assert choice.schedule == "zb-h1"
    assert choice.reason == "zb-h1: 15.8% faster than 1f1b, 15.8% faster than gpipe"
    best = choice.estimates["zb-h1"]
    assert best.step_s < choice.estimates["1f1b"].step_s
    assert best.peak_bytes == choice.estimates["1f1b"].peak_bytes == 1040
    assert choice.estimates["gpipe"].peak_bytes == 1080


def test_what_does_not_fit_is_not_chosen() -> None:
    # The last layer keeps much more, and 1F1B alone has only one micro-batch in flight there.
    profile = profile_of([1.0] * 4, state=1000, activation=[1, 1, 1, 400], memory=1500)
    choice = choose_schedule(plan_of_cuts(([1, 1, 1, 1], 8)), profile)
    assert choice.schedule == "1f1b"
    assert choice.reason == "1f1b: zb-h1 needs 2.5 KiB of 1.5 KiB, gpipe needs 4.1 KiB of 1.5 KiB"


def test_ties_go_to_1f1b() -> None:
    choice = choose_schedule(plan_of_cuts(([4], 8)), memory_profile(10, 2**40))
    assert choice.schedule == "1f1b"
    assert choice.reason == "1f1b: as fast as zb-h1, as fast as gpipe"


def test_a_schedule_that_gains_too_little_is_told_with_its_figure() -> None:
    choice = choose_schedule(plan_of_cuts(([1, 1, 1, 1], 48)), memory_profile(10, 2**40))
    assert choice.schedule == "1f1b"
    gain = 1 - choice.estimates["zb-h1"].step_s / choice.estimates["1f1b"].step_s
    assert 0.01 < gain < 0.05
    assert choice.reason == (
        f"1f1b: zb-h1 is {100 * gain:.1f}% faster but splitting the backward may cost as much, "
        "as fast as gpipe"
    )


def test_where_nothing_fits_it_is_1f1b_and_says_so() -> None:
    choice = choose_schedule(plan_of_cuts(([1, 1, 1, 1], 8)), memory_profile(10, 900))
    assert choice.schedule == "1f1b"
    assert choice.reason.startswith("1f1b: keeps least of all; none fits, zb-h1 needs 1.0 KiB of 9")


def test_a_wanted_schedule_is_taken_or_refused_with_the_bytes() -> None:
    plan = plan_of_cuts(([1, 1, 1, 1], 8))
    choice = choose_schedule(plan, memory_profile(10, 2000), wanted="gpipe")
    assert choice.schedule == "gpipe"
    assert choice.reason == "gpipe: as asked for"
    with pytest.raises(PlanInfeasible, match=r"pipeline_schedule gpipe needs 1\.1 KiB on some"):
        choose_schedule(plan, memory_profile(10, 1050), wanted="gpipe")


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_counted_as_templates_count_it(seed: int) -> None:
    """Odd bytes over three GPUs, at the least memory that the plan fits, and a byte below."""
    rng = random.Random(seed)
    profile = profile_of(
        [1.0] * 6,
        gpus=(3,),
        gpus_per_node=3,
        state=[rng.randint(1, 20) for _ in range(6)],
        activation=[rng.randint(1, 20) for _ in range(6)],
        links=INSTANT,
    )
    plan = replace(random_plan(rng, 6, range(3, 4)), schedule="zb-h1")
    memory = estimate_step(plan, profile).peak_bytes
    for limit, fits in ((memory, True), (memory - 1, False)):
        table = StageTable(replace(profile, gpu_memory_bytes=limit))
        allowed = [
            table.room[
                table.choices.index(len(stage.workers)), stage.first_layer, stage.last_layer + 1
            ]
            >= min(len(pipeline.stages), pipeline.microbatches)
            for pipeline in plan.pipelines
            for stage in pipeline.stages
        ]
        assert all(allowed) == fits
    kept = replace(profile, gpu_memory_bytes=memory)
    assert keep_schedule(plan, kept) == plan
    assert choose_schedule(plan, kept, wanted="zb-h1").schedule == "zb-h1"


def test_a_schedule_stays_as_long_as_memory_allows() -> None:
    plan = plan_of_cuts(([1, 1, 1, 1], 8), schedule="zb-h1")
    assert keep_schedule(plan, memory_profile(10, 1040)) == plan
    assert keep_schedule(plan, memory_profile(10, 1039)).schedule == "1f1b"

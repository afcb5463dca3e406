"""Pipelines side by side in arrays run as each would alone, in the order of its schedule."""

import random
from dataclasses import replace

import pytest

from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.core.profile import Links
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.planner.cost.estimate import Replays, estimate_step
from oobleck.planner.cost.kinds import Cut, Kind, Place, StageTimes, template_cut
from oobleck.planner.cost.replay import Ends, Event, computed_s, least_computed_s, timeline
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.schedule import compute_order
from oobleck.planner.search.templates import feasible_sizes, generate_templates
from support.clocked import run_clocked
from support.plans import plan_of_templates
from support.profiles import random_profile


def random_kind(rng: random.Random, most_stages: int) -> Kind:
    stages = rng.randint(1, most_stages)

    def time() -> float:
        return rng.choice([0.0, rng.uniform(0.1, 3)])

    times = []
    for _ in range(stages):
        into_s, weight_s = time(), time()
        times.append(StageTimes(time(), into_s + weight_s, into_s, weight_s, 0.0))
    microbatches = rng.randint(1, 20)
    cut = Cut(
        places=tuple(Place(stage, stage, 1, stage) for stage in range(stages)),
        stages=tuple(times),
        message_s=tuple(time() for _ in range(stages - 1)),
    )
    return Kind(microbatches, cut)


def alone(schedule: Schedule, kind: Kind) -> list[list[Event]]:
    """Whatever can be computed is, in the order of the schedule, one after the other."""
    stages = range(len(kind.cut.stages))
    orders = [
        list(compute_order(schedule, stages=len(stages), stage=s, microbatches=kind.microbatches))
        for s in stages
    ]
    rows: list[list[Event]] = [[] for _ in stages]
    done = dict[tuple[int, bool, int], float]()
    while any(len(rows[s]) < len(orders[s]) for s in stages):
        for s in stages:
            while len(rows[s]) < len(orders[s]):
                what, microbatch = orders[s][len(rows[s])]
                arrived = arrival(kind, done, s, what, microbatch)
                if arrived is None:
                    break
                begun = max(rows[s][-1].ended_s if rows[s] else 0.0, arrived)
                end = begun + taken_s(kind.cut.stages[s], what)
                rows[s].append(Event(what, microbatch, begun, end))
                if what is not BackwardWeight:
                    done[s, what is Forward, microbatch] = end
    return rows


def arrival(
    kind: Kind, done: dict[tuple[int, bool, int], float], s: int, what: type[Compute], m: int
) -> float | None:
    if what is BackwardWeight or (what is Forward and s == 0):
        return 0.0
    if what is not Forward and s == len(kind.cut.stages) - 1:
        return 0.0
    source, between = (s - 1, s - 1) if what is Forward else (s + 1, s)
    end = done.get((source, what is Forward, m))
    return None if end is None else end + kind.cut.message_s[between]


def taken_s(stage: StageTimes, what: type[Compute]) -> float:
    return {
        Forward: stage.forward_s,
        Backward: stage.backward_s,
        BackwardInput: stage.backward_input_s,
        BackwardWeight: stage.backward_weight_s,
    }[what]


@pytest.mark.parametrize("seed", range(10))
def test_side_by_side_is_as_alone(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [(schedule, random_kind(rng, 9)) for schedule in SCHEDULES for _ in range(30)]
    rng.shuffle(drawn)
    found = computed_s(drawn)
    for schedule, kind in drawn:
        ends = [row[-1].ended_s for row in alone(schedule, kind)]
        assert found[schedule, kind] == pytest.approx(ends, rel=1e-12)


def test_no_schedule_is_done_before_the_least_time() -> None:
    rng = random.Random(4)
    kinds = [random_kind(rng, most_stages=6) for _ in range(100)]
    for (_, kind), ends in computed_s((s, kind) for s in SCHEDULES for kind in kinds).items():
        assert max(ends) >= least_computed_s(kind) * (1 - 1e-9)
    stage = StageTimes(1.0, 2.0, 1.0, 1.0, 0.0)
    places = (Place(0, 0, 1, 0), Place(1, 1, 1, 1))
    cut = Cut(places=places, stages=(stage, stage), message_s=(0.5,))
    # The second stage waits 1.5 s and works 4 x 3 s.
    assert least_computed_s(Kind(4, cut)) == pytest.approx(13.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_timeline_is_that_of_one_alone(schedule: Schedule) -> None:
    rng = random.Random(schedule)
    for _ in range(30):
        kind = random_kind(rng, 6)
        for row, expected in zip(timeline(schedule, kind), alone(schedule, kind), strict=True):
            assert [event[:2] for event in row] == [event[:2] for event in expected]
            for event, other in zip(row, expected, strict=True):
                assert event[2:] == pytest.approx(other[2:], rel=1e-9, abs=1e-9)


def test_very_many_go_side_by_side() -> None:
    rng = random.Random(1)
    drawn = [(rng.choice(SCHEDULES), random_kind(rng, 4)) for _ in range(200)]
    one_by_one: dict[tuple[Schedule, Kind], Ends] = {}
    for question in drawn:
        one_by_one |= computed_s([question])
    assert computed_s(drawn) == one_by_one
    assert computed_s([]) == {}


def test_of_very_many_microbatches_what_is_between_fewer_ones_goes_on() -> None:
    """A replay of all of them would take minutes."""
    cut = Cut(
        places=(Place(0, 0, 1, 0), Place(1, 1, 1, 1)),
        stages=(StageTimes(1.0, 2.0, 1.0, 1.0, 0.0), StageTimes(0.5, 2.0, 1.0, 1.0, 0.0)),
        message_s=(0.0,),
    )
    questions = [("1f1b", Kind(count, cut)) for count in (60, 10**8, 10**9)]
    few, many, more = computed_s(questions).values()
    assert (more[0] - many[0]) / 9e8 == pytest.approx(3.0)
    assert few[0] < many[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("gpus_per_node", "seeds"), [(1, 30), (2, 20), (4, 12)])
def test_plans_of_templates_take_what_their_programs_do(
    gpus_per_node: int, seeds: int, tied: bool
) -> None:
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
        drawn = [(rng.choice(sizes), rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        cuts = {size: template_cut(templates[size], profile) for size in sizes}
        kinds = [Kind(share, cuts[size]) for size, share in drawn]
        (time_s,) = Replays(profile, tied=tied).step_s([{k: kinds.count(k) for k in kinds}])
        plan = plan_of_templates(templates, *drawn)
        expected = run_clocked(compile_programs(plan, tied=tied), profile, plan=plan)
        assert time_s == pytest.approx(expected.step_s, rel=1e-9), (seed, drawn)


@pytest.mark.parametrize("microbatches", [129, 10**6])
def test_templates_and_plans_are_extrapolated_alike(microbatches: int) -> None:
    profile = random_profile(random.Random(1), layers=9)
    templates = generate_templates(profile, range(1, 6))
    drawn = [(5, microbatches), (4, 7), (1, microbatches // 3)]
    kinds = {Kind(share, template_cut(templates[size], profile)): 1 for size, share in drawn}
    (time_s,) = Replays(profile, tied=True).step_s([kinds])
    expected = estimate_step(plan_of_templates(templates, *drawn), profile, tied=True)
    assert time_s == pytest.approx(expected.step_s, rel=1e-9)

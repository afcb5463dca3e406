"""What counts of a step that was cut off: every layer gets every micro-batch exactly once."""

import random
from itertools import pairwise

import numpy as np
import pytest

from oobleck.core.codec import decode, encode
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from oobleck.core.plan import Plan
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler.compile import compile_programs, spread
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.worker.step.salvage import Attempt, Contribution, Salvage, plan_salvage
from support.plans import plan_of_cuts, worker

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "zb-h1")
Table = dict[WorkerId, Contribution]


def random_plan(draw: random.Random, gpus: tuple[int, ...] = (1,)) -> Plan:
    layers = draw.randint(3, 7)
    pipelines = []
    for _ in range(draw.randint(1, 4)):
        ends = sorted(draw.sample(range(1, layers), draw.randint(0, min(3, layers - 1))))
        cuts = [(b - a, draw.choice(gpus)) for a, b in pairwise([0, *ends, layers])]
        pipelines.append((cuts, draw.randint(1, 6)))
    return plan_of_cuts(*pipelines, schedule=draw.choice(SCHEDULES))


def random_table(draw: random.Random, plan: Plan) -> Table:
    """Some workers have nothing, some have sums that overlap."""
    table = {}
    chance = draw.choice([0.0, 0.3, 0.9])
    source = np.random.default_rng(draw.randrange(1 << 30))
    alike = source.random((plan.layer_count, plan.microbatches)) < chance
    for w in plan.workers:
        added = alike.copy() if draw.random() < 0.5 else source.random(alike.shape) < chance
        mine = source.random(plan.microbatches) < draw.choice([0.2, 1.0])
        added &= mine
        known = source.random((2, plan.microbatches)) < draw.choice([0.0, 0.5, 1.0])
        layers = [i in plan.held[w] and draw.random() < 0.8 for i in range(plan.layer_count)]
        added[np.logical_not(layers)] = False
        table[w] = Contribution(added=added, losses=known[0], digests=known[1])
    return table


def check_once(salvage: Salvage, table: Table, plan: Plan) -> None:
    """By the slowest of ways: one sum after the other, one micro-batch after the other."""
    redone = [m for microbatches in salvage.work.microbatches for m in microbatches]
    assert len(set(redone)) == len(redone)
    for layer in range(plan.layer_count):
        stages = [s for p in plan.pipelines for s in p.stages if layer in s.layers]
        times = dict.fromkeys(range(plan.microbatches), 0)
        for stage in stages:
            votes = {layer in salvage.counted[w] for w in stage.workers}
            assert len(votes) == 1, "the workers of a stage count together"
            sums = {tuple(table[w].added[layer]) for w in stage.workers}
            if votes == {True}:
                assert len(sums) == 1
                for m in np.flatnonzero(table[stage.workers[0]].added[layer]):
                    times[m] += 1
        for m in redone:
            (pipeline,) = [n for n, ms in enumerate(salvage.work.microbatches) if m in ms]
            (stage,) = [s for s in plan.pipelines[pipeline].stages if layer in s.layers]
            lacks = layer in salvage.adding(m, stage.layers)
            assert not lacks or layer >= salvage.work.lowest[m]
            times[m] += lacks
        assert set(times.values()) == {1}, f"layer {layer}: {times}"
    for holders, known in (
        (salvage.loss_holder, lambda w: table[w].losses),
        (salvage.digest_holder, lambda w: table[w].digests),
    ):
        assert sorted([*holders, *redone]) == list(range(plan.microbatches))
        assert all(known(w)[m] for m, w in holders.items())
    for m in redone:
        lacking = not salvage.covered[:, m].all()
        unknown = not any(table[w].losses[m] for w in table)
        unnamed = not any(table[w].digests[m] for w in table)
        assert lacking or unknown or unnamed, "what is all there is not done again"


@pytest.mark.parametrize("seed", range(80))
def test_everything_counts_exactly_once(seed: int) -> None:
    draw = random.Random(seed)
    plan = random_plan(draw, gpus=(1, 1, 2))
    table = random_table(draw, plan)
    check_once(plan_salvage(table, plan), table, plan)


def test_everything_that_there_is_counts_where_nothing_overlaps() -> None:
    # Pipeline 0 (workers 0, 1) has done micro-batches 0 and 1, the second of them but in layers 2
    # and 3; pipeline 1 is new.
    plan = plan_of_cuts(([2, 2], 4), ([4], 2))
    table = {w: Contribution.nothing(4, 6) for w in plan.workers}
    table[worker(0)].added[[0, 1], 0] = True
    table[worker(0)].digests[[0, 1, 2]] = True
    table[worker(1)].added[[2, 3], :2] = True
    table[worker(1)].losses[[0, 1]] = True
    salvage = plan_salvage(table, plan)
    assert salvage.microbatches == 1
    assert salvage.counted == {
        worker(0): {0, 1},
        worker(1): {2, 3},
        worker(2): frozenset(),
    }
    assert salvage.work.microbatches == ((1, 2, 3, 4), (5,))
    assert salvage.work.lowest == dict.fromkeys((1, 2, 3, 4, 5), 0)
    assert salvage.adding(1, range(4)) == {0, 1}
    assert salvage.adding(2, range(2, 4)) == {2, 3}
    assert salvage.loss_holder == {0: worker(1)}
    assert salvage.digest_holder == {0: worker(0)}


def test_of_sums_that_overlap_the_larger_one_counts() -> None:
    plan = plan_of_cuts(([1], 2), ([1], 2))
    table = {w: Contribution.nothing(1, 4) for w in plan.workers}
    table[worker(0)].added[0, [0, 1]] = True
    table[worker(1)].added[0, [1, 2, 3]] = True
    salvage = plan_salvage(table, plan)
    assert salvage.counted == {worker(0): frozenset(), worker(1): {0}}
    assert salvage.adding(0, range(1)) == {0}


def test_a_micro_batch_of_which_only_the_loss_is_lost_goes_forward_alone() -> None:
    plan = plan_of_cuts(([1, 1], 2))
    table = {w: Contribution.nothing(2, 2) for w in plan.workers}
    for number in (0, 1):
        table[worker(number)].added[number] = True
        table[worker(number)].digests[:] = True
    table[worker(1)].losses[0] = True
    salvage = plan_salvage(table, plan)
    assert salvage.work.microbatches == ((1,),)
    assert salvage.work.lowest == {1: 2}
    for program in compile_programs(plan, tied=False, work=salvage.work).values():
        assert sum(isinstance(step, Forward) for step in program) == 1
        assert not any(isinstance(step, Backward | ReceiveGradient) for step in program)


def test_of_what_a_worker_tells_the_layers_count_that_may() -> None:
    told = Attempt.of({1: {0, 12}, 3: set(), 4: {7}}, losses=[3, 8], digests=[12], microbatches=13)
    again = decode(Attempt, encode(told))
    assert again == told
    assert set(told.added) == {1, 4}, "a layer without any is left out"
    found = Contribution.of(again, counting={1, 2}, layers=5, microbatches=13)
    assert {(int(la), int(m)) for la, m in np.argwhere(found.added)} == {(1, 0), (1, 12)}
    assert np.flatnonzero(found.losses).tolist() == [3, 8]
    assert np.flatnonzero(found.digests).tolist() == [12]
    with pytest.raises(ValueError, match="2 bytes are not the bits of 30 micro-batches"):
        Contribution.of(again, counting={1}, layers=5, microbatches=30)


@pytest.mark.parametrize("seed", range(40))
def test_programs_of_what_is_left_end_where_nothing_is_lacking(seed: int) -> None:
    draw = random.Random(seed)
    plan = random_plan(draw)
    table = random_table(draw, plan)
    work = plan_salvage(table, plan).work
    programs = compile_programs(plan, tied=draw.random() < 0.5, work=work)
    dry_run(programs, plan)
    for number, pipeline in enumerate(plan.pipelines):
        for position, stage in enumerate(pipeline.stages):
            program = programs[stage.workers[0]]

            def done(*kinds: type, program: object = program) -> list[int]:
                return sorted(s.microbatch for s in program if isinstance(s, kinds))  # type: ignore[attr-defined]

            due = sorted(work.microbatches[number])
            back = [m for m in due if work.lowest[m] <= stage.last_layer]
            down = [m for m in due if work.lowest[m] < stage.first_layer]
            last = position == len(pipeline.stages) - 1
            assert done(Forward) == due
            assert done(Backward, BackwardInput) == done(Backward, BackwardWeight) == back
            assert done(SendGradient) == (down if position else [])
            assert done(ReceiveGradient) == ([] if last else back)
            assert done(SendActivation) == ([] if last else due)
            assert done(ReceiveActivation) == (due if position else [])


@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_is_spread_by_shares(seed: int) -> None:
    """No hand-out of as many has a slowest pipeline that is done sooner."""
    draw = random.Random(seed)
    plan = plan_of_cuts(*(([3], draw.randint(1, 5)) for _ in range(draw.randint(1, 4))))
    left = sorted(draw.sample(range(plan.microbatches), draw.randint(0, plan.microbatches)))
    made = spread(left, plan)
    assert [m for microbatches in made for m in microbatches] == left
    shares = [pipeline.microbatches for pipeline in plan.pipelines]
    worst = max(len(ms) / share for ms, share in zip(made, shares, strict=True))
    if left:
        # Just below that time, all pipelines together cannot take as many.
        assert sum(int(share * worst - 1e-9) for share in shares) < len(left)

"""Programs: the 1F1B order, gradient sync over pipelines that cut the model differently."""

import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Backward,
    Forward,
    LayerPart,
    LoadTokens,
    OptimizerStep,
    Program,
    ReceiveActivation,
    SendActivation,
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.compiler.compile import (
    EVALUATION_ROUND,
    compile_evaluation,
    compile_programs,
)
from oobleck.planner.programs.compiler.gradients import BUCKET_BYTES, gradient_buckets
from oobleck.planner.programs.compiler.proof import dry_run, format_instruction
from support.plans import plan_of_cuts, worker


def compute_order(program: tuple[object, ...]) -> str:
    return " ".join(
        f"{'F' if isinstance(step, Forward) else 'B'}{step.microbatch}"
        for step in program
        if isinstance(step, Forward | Backward)
    )


def test_one_forward_one_backward_warms_up_by_the_stages_that_follow() -> None:
    programs = compile_programs(plan_of_cuts(([1, 1, 1], 4)), tied=False)
    assert compute_order(programs[worker(0)]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert compute_order(programs[worker(1)]) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert compute_order(programs[worker(2)]) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_microbatches_than_stages_are_all_forwarded_first() -> None:
    programs = compile_programs(plan_of_cuts(([1, 1, 1, 1], 2)), tied=False)
    assert compute_order(programs[worker(0)]) == "F0 F1 B0 B1"
    assert compute_order(programs[worker(2)]) == "F0 F1 B0 B1"


def test_the_second_pipeline_goes_on_counting_microbatches() -> None:
    programs = compile_programs(plan_of_cuts(([2], 2), ([1, 1], 1)), tied=False)
    assert compute_order(programs[worker(0)]) == "F0 B0 F1 B1"
    assert compute_order(programs[worker(1)]) == "F2 B2"


def test_a_single_stage_talks_to_nobody_and_loads_each_microbatch_once() -> None:
    program = compile_programs(plan_of_cuts(([3], 2)), tied=True)[worker(0)]
    kinds = Counter(type(step).__name__ for step in program)
    assert kinds == {
        "LoadTokens": 2,
        "Forward": 2,
        "Backward": 2,
        "SyncGradient": 1,
        "Vote": 1,
        "OptimizerStep": 1,
    }


def test_first_and_last_stage_load_tokens_before_their_forward() -> None:
    programs = compile_programs(plan_of_cuts(([1, 1, 1], 1)), tied=False)
    loads = [sum(isinstance(s, LoadTokens) for s in programs[worker(n)]) for n in range(3)]
    assert loads == [1, 0, 1]
    for number in (0, 2):
        kinds = [type(step) for step in programs[worker(number)]]
        assert kinds.index(LoadTokens) < kinds.index(Forward)


def test_buckets_are_the_distinct_owner_sets_highest_layers_first() -> None:
    # n0: 0-2, n1: 3-4   |   n2: 0-1, n3: 2-4
    buckets = gradient_buckets(plan_of_cuts(([3, 2], 1), ([2, 3], 1)), tied=False)
    assert [(b.owners, [p.layer for p in b.parts]) for b in buckets] == [
        ((worker(1), worker(3)), [3, 4]),
        ((worker(0), worker(3)), [2]),
        ((worker(0), worker(2)), [0, 1]),
    ]


def test_tied_parts_are_summed_over_the_holders_of_both_ends() -> None:
    programs = compile_programs(plan_of_cuts(([3, 2], 1), ([5], 1)), tied=True)
    owners = (worker(0), worker(1), worker(2))
    tied = {
        number: [
            part
            for step in programs[worker(number)]
            if isinstance(step, SyncGradient) and step.owners == owners
            for part in step.parts
        ]
        for number in range(3)
    }
    first, last = LayerPart(layer=0, part="tied"), LayerPart(layer=4, part="tied")
    assert tied == {0: [first], 1: [last], 2: [first, last]}


@pytest.mark.parametrize("tied", [False, True])
def test_each_part_counts_once_in_the_norm(tied: bool) -> None:
    programs = compile_programs(plan_of_cuts(([3, 2], 1), ([5], 1), ([1, 1, 3], 2)), tied=tied)
    counted = Counter(
        (part.part, part.layer if part.part == "own" else None)
        for program in programs.values()
        for step in program
        if isinstance(step, Vote)
        for part in step.norm_parts
    )
    expected = Counter({("own", layer): 1 for layer in range(5)})
    if tied:
        expected["tied", None] = 1
    assert counted == expected


def test_sync_follows_the_last_backward_and_the_optimizer_ends_the_step() -> None:
    for program in compile_programs(plan_of_cuts(([3, 2], 3), ([5], 1)), tied=True).values():
        kinds = [type(step) for step in program]
        last_backward = max(i for i, kind in enumerate(kinds) if kind is Backward)
        assert kinds.index(SyncGradient) > last_backward
        assert kinds[-2:] == [Vote, OptimizerStep]


def words(program: Program, kind: str) -> list[str]:
    return [text for step in program if f":{kind}" in (text := format_instruction(step))]


def test_stages_of_several_workers_exchange_the_rows_they_share() -> None:
    # Stage 0 on 2 workers, stage 1 on 3: of six sixths of the rows each holds 3, or 2.
    programs = compile_programs(plan_of_cuts(([(1, 2), (1, 3)], 1)), tied=False)
    assert words(programs[worker(0, 0)], "SEND") == [
        "0-0:SEND_F0(0:2/6)>n1/0",
        "0-0:SEND_F0(2:3/6)>n1/1",
    ]
    assert words(programs[worker(0, 1)], "SEND") == [
        "0-0:SEND_F0(3:4/6)>n1/1",
        "0-0:SEND_F0(4:6/6)>n1/2",
    ]
    assert words(programs[worker(1, 1)], "RECV") == [
        "1-1:RECV_F0(2:3/6)<n0/0",
        "1-1:RECV_F0(3:4/6)<n0/1",
    ]
    assert words(programs[worker(1, 1)], "SEND") == [
        "1-1:SEND_B0(2:3/6)>n0/0",
        "1-1:SEND_B0(3:4/6)>n0/1",
    ]


def test_equally_wide_stages_talk_worker_to_worker() -> None:
    programs = compile_programs(plan_of_cuts(([(1, 2), (1, 2)], 1)), tied=False)
    assert words(programs[worker(0, 1)], "SEND") == ["0-0:SEND_F0(1:2/2)>n1/1"]
    assert words(programs[worker(0, 1)], "RECV") == ["0-0:RECV_B0(1:2/2)<n1/1"]


def test_gradients_of_differently_wide_stages_are_summed_piece_by_piece() -> None:
    # Layers 0-1 on 2 workers, on 3 and on 1.
    plan = plan_of_cuts(([(2, 2)], 1), ([(2, 3)], 1), ([2], 1))
    buckets = gradient_buckets(plan, tied=False)
    assert [(format_part(b.parts[0]), b.owners) for b in buckets] == [
        ("0:2/6", (worker(0, 0), worker(1, 0), worker(2))),
        ("2:3/6", (worker(0, 0), worker(1, 1), worker(2))),
        ("3:4/6", (worker(0, 1), worker(1, 1), worker(2))),
        ("4:6/6", (worker(0, 1), worker(1, 2), worker(2))),
    ]
    assert all([part.layer for part in bucket.parts] == [0, 1] for bucket in buckets)


def format_part(part: LayerPart) -> str:
    return f"{part.share.start}:{part.share.stop}/{part.share.of}"


@pytest.mark.parametrize("tied", [False, True])
def test_every_piece_of_every_layer_is_summed_over_one_worker_of_each_pipeline(tied: bool) -> None:
    rng = random.Random(tied)
    for _ in range(100):
        layers = rng.randint(2, 6)
        pipelines = []
        for _ in range(rng.randint(1, 4)):
            cuts = sorted(rng.sample(range(1, layers), rng.randint(0, layers - 1)))
            sizes = [b - a for a, b in pairwise([0, *cuts, layers])]
            pipelines.append(([(size, rng.randint(1, 4)) for size in sizes], 1))
        plan = plan_of_cuts(*pipelines)
        held = plan.held
        covered: Counter[tuple[int, str, WorkerId]] = Counter()
        for bucket in gradient_buckets(plan, tied=tied):
            assert list(bucket.owners) == sorted(set(bucket.owners))
            for part in bucket.parts:
                holders = [owner for owner in bucket.owners if part.layer in held[owner]]
                assert len(holders) == len(plan.pipelines)
                size = Fraction(part.share.stop - part.share.start, part.share.of)
                for owner in holders:
                    covered[part.layer, part.part, owner] += size
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                parts = [(layer, "own") for layer in stage.layers]
                parts += [(la, "tied") for la in {0, layers - 1} if tied and la in stage.layers]
                for owner in stage.workers:
                    for layer, part in parts:
                        share = covered.pop((layer, part, owner))
                        assert share == Fraction(1, len(stage.workers))
        assert not covered


@pytest.mark.parametrize("seed", range(30))
def test_full_buckets_are_in_the_order_of_the_backward_and_hold_the_same_parts(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(3, 12)
    plan = plan_of_cuts(*((random_cut(draw, layers), 1) for _ in range(draw.randint(1, 4))))
    tied = draw.random() < 0.5
    layer_bytes = [draw.choice([1, BUCKET_BYTES // 3, 2 * BUCKET_BYTES]) for _ in range(layers)]
    whole = {b.owners: set(b.parts) for b in gradient_buckets(plan, tied=tied)}
    cut: dict[tuple[WorkerId, ...], list[tuple[LayerPart, ...]]] = {}
    for bucket in gradient_buckets(plan, tied=tied, layer_bytes=layer_bytes):
        cut.setdefault(bucket.owners, []).append(bucket.parts)
    assert {owners: {p for b in buckets for p in b} for owners, buckets in cut.items()} == whole
    for buckets in cut.values():
        own = [[p.layer for p in parts if p.part == "own"] for parts in buckets]
        for above, below in pairwise(own):
            assert min(above) > max(below)
        for parts in buckets[:-1]:
            assert not any(p.part == "tied" for p in parts)
            sizes = [p.share.of_bytes(layer_bytes[p.layer]) for p in reversed(parts)]
            assert (
                sum(sizes)
                >= BUCKET_BYTES
                > sum(sizes[: -sum(p.layer == parts[0].layer for p in parts)])
            )


def random_cut(draw: random.Random, layers: int) -> list[int]:
    ends = sorted(draw.sample(range(1, layers), draw.randint(0, min(3, layers - 1))))
    return [stop - start for start, stop in pairwise([0, *ends, layers])]


def test_an_evaluation_forwards_every_microbatch_once_through_every_layer() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    for _ in range(30):
        shapes = []
        for _ in range(rng.randint(1, 3)):
            cuts = rng.choice([[4], [1, 3], [2, 1, 1], [1, 1, 1, 1]])
            shapes.append((cuts, rng.randint(1, 5)))
        plan = plan_of_cuts(*shapes)
        count = rng.randint(1, 60)
        rounds = compile_evaluation(plan, count)
        assert set(rounds) == set(plan.workers)
        dry_run(
            {w: tuple(step for one in each for step in one) for w, each in rounds.items()}, plan
        )
        forwarded = Counter()
        for member, programs in rounds.items():
            for program in programs:
                kinds = {type(step) for step in program}
                assert kinds <= {LoadTokens, ReceiveActivation, Forward, SendActivation}, seed
                steps = [step.microbatch for step in program if isinstance(step, Forward)]
                assert 0 < len(steps) <= EVALUATION_ROUND, seed
                forwarded.update((m, layer) for m in steps for layer in plan.held[member])
        assert forwarded == Counter((m, layer) for m in range(count) for layer in range(4)), seed

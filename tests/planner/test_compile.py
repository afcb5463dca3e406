"""Programs: the 1F1B order, gradient sync over pipelines that cut the model differently."""

from collections import Counter

import pytest

from oobleck.planner.compile import compile_programs, gradient_buckets
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.plan import Pipeline, Plan, Stage
from oobleck.planner.program import (
    Backward,
    Forward,
    LayerPart,
    LoadTokens,
    OptimizerStep,
    SyncGradient,
    Vote,
)


def make_plan(*pipelines: tuple[list[int], int]) -> Plan:
    """Each pipeline: the layers per stage (one node each) and its micro-batches."""
    made, node, microbatch = [], 0, 0
    for sizes, microbatches in pipelines:
        stages, nodes, layer = [], [], 0
        for size in sizes:
            name = NodeName(f"n{node}")
            node += 1
            nodes.append(name)
            stages.append(
                Stage(first_layer=layer, last_layer=layer + size - 1, workers=(WorkerId(name, 0),))
            )
            layer += size
        made.append(
            Pipeline(
                nodes=tuple(nodes),
                stages=tuple(stages),
                first_microbatch=microbatch,
                microbatches=microbatches,
            )
        )
        microbatch += microbatches
    return Plan(generation=Generation(1), pipelines=tuple(made))


def worker(number: int) -> WorkerId:
    return WorkerId(NodeName(f"n{number}"), 0)


def compute_order(program: tuple[object, ...]) -> str:
    return " ".join(
        f"{'F' if isinstance(step, Forward) else 'B'}{step.microbatch}"
        for step in program
        if isinstance(step, Forward | Backward)
    )


def test_one_forward_one_backward_warms_up_by_the_stages_that_follow() -> None:
    programs = compile_programs(make_plan(([1, 1, 1], 4)), tied=False)
    assert compute_order(programs[worker(0)]) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert compute_order(programs[worker(1)]) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert compute_order(programs[worker(2)]) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_microbatches_than_stages_are_all_forwarded_first() -> None:
    programs = compile_programs(make_plan(([1, 1, 1, 1], 2)), tied=False)
    assert compute_order(programs[worker(0)]) == "F0 F1 B0 B1"
    assert compute_order(programs[worker(2)]) == "F0 F1 B0 B1"


def test_the_second_pipeline_goes_on_counting_microbatches() -> None:
    programs = compile_programs(make_plan(([2], 2), ([1, 1], 1)), tied=False)
    assert compute_order(programs[worker(0)]) == "F0 B0 F1 B1"
    assert compute_order(programs[worker(1)]) == "F2 B2"


def test_a_single_stage_talks_to_nobody_and_loads_each_microbatch_once() -> None:
    program = compile_programs(make_plan(([3], 2)), tied=True)[worker(0)]
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
    programs = compile_programs(make_plan(([1, 1, 1], 1)), tied=False)
    loads = [sum(isinstance(s, LoadTokens) for s in programs[worker(n)]) for n in range(3)]
    assert loads == [1, 0, 1]
    for number in (0, 2):
        kinds = [type(step) for step in programs[worker(number)]]
        assert kinds.index(LoadTokens) < kinds.index(Forward)


def test_buckets_are_the_distinct_owner_sets_highest_layers_first() -> None:
    # n0: 0-2, n1: 3-4   |   n2: 0-1, n3: 2-4
    buckets = gradient_buckets(make_plan(([3, 2], 1), ([2, 3], 1)), tied=False)
    assert [(b.owners, [p.layer for p in b.parts]) for b in buckets] == [
        ((worker(1), worker(3)), [3, 4]),
        ((worker(0), worker(3)), [2]),
        ((worker(0), worker(2)), [0, 1]),
    ]


def test_tied_parts_are_summed_over_the_holders_of_both_ends() -> None:
    programs = compile_programs(make_plan(([3, 2], 1), ([5], 1)), tied=True)
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
    programs = compile_programs(make_plan(([3, 2], 1), ([5], 1), ([1, 1, 3], 2)), tied=tied)
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
    for program in compile_programs(make_plan(([3, 2], 3), ([5], 1)), tied=True).values():
        kinds = [type(step) for step in program]
        last_backward = max(i for i, kind in enumerate(kinds) if kind is Backward)
        assert kinds.index(SyncGradient) > last_backward
        assert kinds[-2:] == [Vote, OptimizerStep]


def test_a_stage_of_two_workers_is_refused() -> None:
    node = NodeName("n0")
    stage = Stage(first_layer=0, last_layer=2, workers=(WorkerId(node, 0), WorkerId(node, 1)))
    pipeline = Pipeline(nodes=(node,), stages=(stage,), first_microbatch=0, microbatches=1)
    plan = Plan(generation=Generation(1), pipelines=(pipeline,))
    with pytest.raises(ValueError, match="stage 0 stands on 2 workers"):
        compile_programs(plan, tied=False)

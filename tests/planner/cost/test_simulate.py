"""The dry run: no deadlock in any compiled program, and times that can be checked by hand."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from oobleck.planner.cost.formula import StageCosts, pipeline_cost, seconds
from oobleck.planner.cost.simulate import simulate
from oobleck.planner.cost.steptime import estimate_step, worker_peak_bytes
from oobleck.planner.errors import ProgramDeadlock
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.profile.profile import Links
from oobleck.planner.programs.compile import compile_programs
from oobleck.planner.programs.instructions import Backward, Forward, SendActivation, SyncGradient
from oobleck.planner.programs.plan import Plan, place
from oobleck.planner.programs.text import (
    format_instruction,
    format_programs,
    parse_instruction,
    parse_programs,
)
from oobleck.planner.search.templates import generate_templates
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of, random_profile

#: As if messages took no time.
INSTANT = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=1e18, latency_s=0.0)


def plan_of(templates, *pipelines: tuple[int, int]) -> Plan:  # type: ignore[no-untyped-def]
    """Each pipeline: nodes and micro-batches."""
    made, node, first = [], 0, 0
    for size, microbatches in pipelines:
        nodes = tuple(NodeName(f"n{n}") for n in range(node, node + size))
        made.append(
            place(templates[size], nodes, first_microbatch=first, microbatches=microbatches)
        )
        node += size
        first += microbatches
    return Plan(generation=Generation(1), pipelines=tuple(made))


def test_equal_stages_take_the_textbook_time() -> None:
    profile = profile_of([1.0] * 4, links=INSTANT)
    plan = plan_of(generate_templates(profile, range(4, 5)), (4, 6))
    result = simulate(compile_programs(plan, tied=False), profile, plan=plan)
    assert result.step_s == pytest.approx((6 + 4 - 1) * 3.0)
    assert result.bubble == pytest.approx(3 / 9)
    assert all(busy == pytest.approx(6 * 3.0) for busy in result.busy_s.values())


def test_peak_memory_counts_the_microbatches_in_flight() -> None:
    profile = profile_of([1.0] * 3, state=1000, activation=[1, 10, 100])
    plan = plan_of(generate_templates(profile, range(3, 4)), (3, 8))
    result = simulate(compile_programs(plan, tied=False), profile, plan=plan)
    assert [result.peak_bytes[worker(n)] for n in range(3)] == [1003, 1020, 1100]


def test_what_the_heap_keeps_of_one_layer_is_beside_what_is_mapped_for_another() -> None:
    base = profile_of([1.0] * 3, state=1000, activation=[0, 0, 0])
    both = ((30, 0), (10, 500), (20, 100))
    layers = tuple(
        replace(layer, working_bytes=working, mapped_bytes=mapped)
        for layer, (working, mapped) in zip(base.layers, both, strict=True)
    )
    plan = plan_of_cuts(([1, 2], 1), ([3], 1))
    profile = replace(base, layers=layers)
    result = simulate(compile_programs(plan, tied=False), profile, plan=plan)
    assert list(result.peak_bytes.values()) == [1030, 2520, 3530]
    for memory, fits in ((3530, True), (3529, False)):
        costs = StageCosts(replace(profile, gpu_memory_bytes=memory))
        assert costs.allowed(0, 3, 1, in_flight=1) == fits


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
        result = simulate(compile_programs(plan, tied=True), profile, plan=plan)
        assert [result.peak_bytes[w] for w in plan.workers] == expected
        kinds = estimate_step(plan, profile, tied=True).kinds
        assert [peak for kind in kinds for peak in kind.peak_bytes] == expected
        assert worker_peak_bytes(plan, profile) == result.peak_bytes


def test_messages_and_sums_take_their_time() -> None:
    links = Links(intra_node_bytes_per_s=1e9, inter_node_bytes_per_s=100.0, latency_s=0.5)
    profile = profile_of([1.0, 1.0], state=4000, links=links)
    plan = plan_of(generate_templates(profile, range(1, 3)), (2, 1), (2, 1))
    result = simulate(compile_programs(plan, tied=False), profile, plan=plan)
    compute, message, gradient, vote = 6.0, 0.5 + 1.0, 2 * (0.5 + 500 / 100), 6 * (0.5 + 16 / 100)
    assert result.step_s == pytest.approx(compute + 2 * message + gradient + vote)


def test_the_optimizer_takes_its_time_on_each_worker() -> None:
    profile = profile_of([1.0, 1.0, 1.0], links=INSTANT)
    updated = tuple(
        replace(layer, update_s={1: seconds_})
        for layer, seconds_ in zip(profile.layers, (0.25, 0.5, 0.125), strict=True)
    )
    plan = plan_of_cuts(([2, 1], 1))
    run = simulate(compile_programs(plan, tied=False), replace(profile, layers=updated), plan=plan)
    assert run.step_s == pytest.approx(9 + 0.75)
    assert run.busy_s[worker(1)] == pytest.approx(3 + 0.125)


def test_the_tied_weight_travels_once_and_to_all_its_holders() -> None:
    """Two pipelines of 2 stages: the head's parameters (250) are tied but for nothing, those of
    the embedding (300) but for 50."""
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = replace(profile_of([0.0] * 3, state=[1200, 400, 1000], links=links))
    plan = plan_of_cuts(([2, 1], 1), ([2, 1], 1))
    times = {}
    for tied in (False, True):
        programs = compile_programs(plan, tied=tied)
        times[tied] = simulate(programs, profile, plan=plan).step_s
    ways, vote = 2 * 1.0, 6 * 16 / 100
    assert times[False] == pytest.approx(ways + 2 * (300 + 100) / 2 / 100 + vote)
    # 250 bytes over the four ends, then 50 and layer 1's 100 over the two first stages.
    assert times[True] == pytest.approx(ways + 6 * 250 / 4 / 100 + 2 * 150 / 2 / 100 + vote)


def test_workers_of_a_stage_share_bytes_and_memory() -> None:
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = profile_of([1.0, 1.0], gpus=(1, 2), gpus_per_node=2, links=links)
    plan = plan_of_cuts(([(1, 2), (1, 1)], 1))
    run = simulate(compile_programs(plan, tied=False), profile, plan=plan)
    halved = (1 + 2) / 2**0.9
    # Each half of the rows takes half a second.
    assert run.step_s == pytest.approx(halved + 0.5 + 3 + 0.5 + 2 * 2 * 64 / 3 / 100)
    assert run.peak_bytes == {worker(0, 0): 505, worker(0, 1): 505, worker(1): 1010}


def test_workers_of_a_stage_wait_for_each_other() -> None:
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = profile_of([1.0, 1.0], gpus=(2, 3), gpus_per_node=3, links=links)
    plan = plan_of_cuts(([(1, 2), (1, 3)], 1))
    programs = compile_programs(plan, tied=False)
    begun: dict[WorkerId, float] = {}
    simulate(
        programs,
        profile,
        plan=plan,
        observe=lambda who, step, begun_s, _: begun.setdefault(who, begun_s),
    )
    # The outer two get a third of the rows from one worker, the middle one a sixth from each.
    assert {begun[worker(1, slot)] for slot in range(3)} == {1 / 2**0.9 + 34 / 100}

    lame = {**programs, worker(1, 1): programs[worker(1, 1)][-2:]}
    with pytest.raises(ProgramDeadlock, match=r"n1/0 waits at 0\.1:F0 for the other workers of"):
        simulate(lame, profile, plan=plan)


def test_pieces_of_a_layer_are_summed_side_by_side() -> None:
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = profile_of([0.0], gpus=(1, 2), gpus_per_node=2, state=4000, links=links)
    plan = plan_of_cuts(([(1, 2)], 1), ([(1, 1)], 1))
    run = simulate(compile_programs(plan, tied=False), profile, plan=plan)
    # The one worker sums both halves, one after the other; each of the two its own.
    assert run.step_s == pytest.approx(2 * (2 * 500 / 2 / 100) + 4 * 64 / 3 / 100)


def test_the_observer_sees_all_compute() -> None:
    profile = profile_of([1.0, 1.0], links=INSTANT)
    plan = plan_of_cuts(([1, 1], 2), schedule="zb-h1")
    seen: list[tuple[WorkerId, str, float, float]] = []
    run = simulate(
        compile_programs(plan, tied=False),
        profile,
        plan=plan,
        observe=lambda who, step, begun_s, ended_s: seen.append(
            (who, type(step).__name__, begun_s, ended_s)
        ),
    )
    assert seen[0] == (worker(0), "Forward", 0.0, 1.0)
    for number in (0, 1):
        mine = [event for event in seen if event[0] == worker(number)]
        assert sum(end - start for *_, start, end in mine) == pytest.approx(
            run.busy_s[worker(number)]
        )
        assert mine[-1][-1] == run.computed_s[worker(number)]
    kinds = Counter(name for who, name, *_ in seen if who == worker(1))
    assert kinds == {"Forward": 2, "BackwardInput": 2, "BackwardWeight": 2}


@pytest.mark.parametrize("seed", range(20))
def test_the_formula_of_planning_is_close_to_the_dry_run(seed: int) -> None:
    rng = random.Random(seed)
    profile = replace(
        random_profile(rng, layers=10),
        links=Links(intra_node_bytes_per_s=1e3, inter_node_bytes_per_s=1e3, latency_s=0.01),
    )
    size = rng.randint(1, 6)
    templates = generate_templates(profile, range(size, size + 1))
    for microbatches in (1, 2, size, 3 * size, 40):
        plan = plan_of(templates, (size, microbatches))
        run = simulate(compile_programs(plan, tied=False), profile, plan=plan).step_s
        formula = seconds(pipeline_cost(templates[size], profile).time(microbatches))
        # The formula leaves out that short stages make up for part of the first round trip.
        assert 0.99 * run <= formula <= 1.25 * run


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("tied", [False, True])
def test_programs_of_any_plan_end_and_do_everything_once(seed: int, tied: bool) -> None:
    rng = random.Random(seed)
    layers = rng.randint(2, 9)
    profile = random_profile(rng, layers=layers)
    templates = generate_templates(profile, range(1, layers + 1))
    plan = plan_of(
        templates,
        *((rng.randint(1, min(layers, 5)), rng.randint(1, 7)) for _ in range(rng.randint(1, 4))),
    )
    programs = compile_programs(plan, tied=tied)
    assert tuple(programs) == plan.workers
    assert parse_programs(format_programs(programs)) == programs
    simulate(programs, profile, plan=plan)

    held = plan.holdings()
    forward: Counter[tuple[int, int]] = Counter()
    backward: Counter[tuple[int, int]] = Counter()
    order: dict[tuple[WorkerId, ...], list[tuple[WorkerId, list[int]]]] = {}
    for owner, program in programs.items():
        synced: Counter[tuple[int, str]] = Counter()
        buckets: dict[tuple[WorkerId, ...], list[int]] = {}
        for step in program:
            for kind, counter in ((Forward, forward), (Backward, backward)):
                if isinstance(step, kind):
                    counter.update((step.microbatch, layer) for layer in held[owner])
            if isinstance(step, SyncGradient):
                synced.update((part.layer, part.part) for part in step.parts)
                buckets.setdefault(step.owners, []).append(step.bucket)
                assert owner in step.owners
                for part in step.parts:
                    if part.part == "own":
                        assert step.owners == plan.owners(part.layer)
                    else:
                        ends = {*plan.owners(0), *plan.owners(layers - 1)}
                        assert step.owners == tuple(sorted(ends))
        ends_held = {0, layers - 1} & set(held[owner]) if tied else set()
        assert synced == Counter(
            [(layer, "own") for layer in held[owner]] + [(layer, "tied") for layer in ends_held]
        )
        for owners, numbers in buckets.items():
            order.setdefault(owners, []).append((owner, numbers))
    everything = Counter({(m, la): 1 for m in range(plan.microbatches) for la in range(layers)})
    assert forward == everything
    assert backward == everything
    for owners, issued in order.items():
        assert tuple(sorted(owner for owner, _ in issued)) == owners
        assert len({tuple(numbers) for _, numbers in issued}) == 1


def test_blocking_sends_deadlock_and_the_report_names_both_sides() -> None:
    profile = profile_of([1.0, 1.0])
    plan = plan_of(generate_templates(profile, range(2, 3)), (2, 2))
    programs = parse_programs(
        # Compute between a send and the receive that answers it: they are no exchange any more.
        "n0/0: 0.0:LOAD0 0.0:F0 0.0:SEND_F0>n1/0 0.0:LOAD1 0.0:F1 0.0:SEND_F1>n1/0 "
        "0.0:LOAD2 0.0:F2 0.0:RECV_B0<n1/0 0.0:B0 0.0:RECV_B1<n1/0 0.0:B1 VOTE[] STEP\n"
        "n1/0: 0.1:LOAD0 0.1:RECV_F0<n0/0 0.1:F0 0.1:B0 0.1:SEND_B0>n0/0 "
        "0.1:LOAD2 0.1:F2 0.1:LOAD1 0.1:RECV_F1<n0/0 0.1:F1 0.1:B1 0.1:SEND_B1>n0/0 VOTE[] STEP\n"
    )
    simulate(programs, profile, plan=plan)
    with pytest.raises(ProgramDeadlock) as caught:
        simulate(programs, profile, plan=plan, blocking_sends=True)
    assert caught.value.waiting == (
        "n0/0 waits at 0.0:SEND_F1>n1/0 for n1/0",
        "n1/0 waits at 0.1:SEND_B0>n0/0 for n0/0",
    )


def test_what_blocking_sends_cost() -> None:
    links = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=100.0, latency_s=0.0)
    profile = profile_of([1.0, 1.0], links=links)
    plan = plan_of_cuts(([1, 1], 2))
    programs = compile_programs(plan, tied=False)
    vote = 2 * 64 / 2 / 100
    # Sends that go ahead: F0 over at 1 and there at 2, B0 there until 5, F1 and B1 until 8, the
    # gradient back at 9, the last backward until 11.
    assert simulate(programs, profile, plan=plan).step_s == pytest.approx(11 + vote)
    # Blocking: F1 begins after F0's way, at 2; F1's output and B0's gradient cross from 5 to 6, F1
    # and B1 until 9, the gradient back at 10.
    blocking = simulate(programs, profile, plan=plan, blocking_sends=True)
    assert blocking.step_s == pytest.approx(12 + vote)


def test_a_send_that_is_missing_is_found() -> None:
    profile = profile_of([1.0, 1.0])
    plan = plan_of(generate_templates(profile, range(2, 3)), (2, 2))
    programs = dict(compile_programs(plan, tied=False))
    programs[worker(0)] = tuple(
        step
        for step in programs[worker(0)]
        if not (isinstance(step, SendActivation) and step.microbatch == 1)
    )
    with pytest.raises(ProgramDeadlock, match=r"n1/0 waits at 0\.1:RECV_F1<n0/0 for n0/0"):
        simulate(programs, profile, plan=plan)


def test_sums_in_different_orders_are_found() -> None:
    profile = profile_of([1.0, 2.0, 1.0])
    plan = plan_of(generate_templates(profile, range(1, 3)), (1, 1), (1, 1))
    programs = parse_programs(
        "n0/0: SYNC0[2]@n0/0,n1/0 SYNC1[0,1]@n0/0,n1/0 VOTE[0,1,2] STEP\n"
        "n1/0: SYNC1[0,1]@n0/0,n1/0 SYNC0[2]@n0/0,n1/0 VOTE[] STEP\n"
    )
    with pytest.raises(ProgramDeadlock, match="for the sum of bucket 0"):
        simulate(programs, profile, plan=plan)


def test_program_text_reads_like_this() -> None:
    profile = profile_of([1.0, 1.0, 1.0])
    plan = plan_of(generate_templates(profile, range(1, 3)), (2, 1), (1, 1))
    assert format_programs(compile_programs(plan, tied=True)) == (
        "n0/0: 0.0:LOAD0 0.0:F0 0.0:SEND_F0>n1/0 0.0:RECV_B0<n1/0 0.0:B0 "
        "SYNC0[tied:0]@n0/0,n1/0,n2/0 SYNC2[0,1]@n0/0,n2/0 VOTE[0,tied:0] STEP\n"
        "n1/0: 0.1:LOAD0 0.1:RECV_F0<n0/0 0.1:F0 0.1:B0 0.1:SEND_B0>n0/0 "
        "SYNC0[tied:2]@n0/0,n1/0,n2/0 SYNC1[2]@n1/0,n2/0 VOTE[2] STEP\n"
        "n2/0: 1.0:LOAD1 1.0:F1 1.0:B1 SYNC0[tied:0,tied:2]@n0/0,n1/0,n2/0 "
        "SYNC1[2]@n1/0,n2/0 SYNC2[0,1]@n0/0,n2/0 VOTE[1] STEP\n"
    )


@pytest.mark.parametrize(
    "word",
    [
        "",
        "JUMP",
        "0.0:F",
        "0.0:F1<n0/0",
        "0.0:F1(0:1/2)",
        "0.0:RECV_F1",
        "0.0:RECV_F1<n0",
        "0.0:RECV_F1>n0/0",
        "0.0:RECV_F1(x)<n0/0",
        "SYNC0[1]",
    ],
)
def test_words_that_are_no_instruction_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        parse_instruction(word)


def test_an_empty_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a share is 2:2/4; it must not be empty"):
        parse_instruction("0.0:RECV_F1(2:2/4)<n0/0")


def test_every_word_survives() -> None:
    for word in (
        "0.1:RECV_B3<a.b-c/2",
        "12.0:SEND_F7>n0/0",
        "0.2:SEND_B1(1:2/4)>n0/3",
        "VOTE[]",
        "VOTE[0(0:1/2),tied:0(0:1/2)]",
        "SYNC3[4(2:3/6),tied:4(2:3/6)]@n0/0,n1/2",
        "STEP",
        "0.0:LOAD3",
        "0.1:BI3",
        "0.1:BW3",
    ):
        assert format_instruction(parse_instruction(word)) == word

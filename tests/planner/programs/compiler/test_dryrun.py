"""The dry run: no deadlock in any compiled program, and who waits for what in others."""

import random
from collections import Counter

import pytest

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Backward, Forward, SendActivation, Share, SyncGradient
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.proof import dry_run, format_instruction
from oobleck.planner.search.templates import generate_templates
from support.plans import plan_of_cuts, plan_of_templates, worker
from support.profiles import profile_of, random_profile
from support.program_text import format_programs, parse_instruction, parse_programs


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("tied", [False, True])
def test_programs_of_any_plan_end_and_do_everything_once(seed: int, tied: bool) -> None:
    rng = random.Random(seed)
    layers = rng.randint(2, 9)
    profile = random_profile(rng, layers=layers)
    templates = generate_templates(profile, range(1, layers + 1))
    plan = plan_of_templates(
        templates,
        *((rng.randint(1, min(layers, 5)), rng.randint(1, 7)) for _ in range(rng.randint(1, 4))),
    )
    programs = compile_programs(plan, tied=tied)
    assert tuple(programs) == plan.workers
    assert parse_programs(format_programs(programs)) == programs
    dry_run(programs, plan)

    held = plan.held
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


def test_a_send_that_is_missing_is_found() -> None:
    profile = profile_of([1.0, 1.0])
    plan = plan_of_templates(generate_templates(profile, range(2, 3)), (2, 2))
    programs = dict(compile_programs(plan, tied=False))
    programs[worker(0)] = tuple(
        step
        for step in programs[worker(0)]
        if not (isinstance(step, SendActivation) and step.microbatch == 1)
    )
    with pytest.raises(ProgramDeadlock, match=r"n1/0 waits at 1-1:RECV_F1<n0/0 for n0/0"):
        dry_run(programs, plan)


def test_the_workers_of_a_stage_compute_together() -> None:
    plan = plan_of_cuts(([(1, 2), (1, 3)], 1))
    programs = compile_programs(plan, tied=False)
    dry_run(programs, plan)
    lame = {**programs, worker(1, 1): programs[worker(1, 1)][-2:]}
    with pytest.raises(ProgramDeadlock, match=r"n1/0 waits at 1-1:F0 for the other workers of"):
        dry_run(lame, plan)


def test_messages_out_of_order_are_found() -> None:
    """All of them are there, and the first of the link is not the one that is waited for."""
    plan = plan_of_cuts(([1, 1], 2), schedule="gpipe")
    text = format_programs(compile_programs(plan, tied=False))
    first, second = "1-1:RECV_F0<n0/0", "1-1:RECV_F1<n0/0"
    swapped = text.replace(first, "?").replace(second, first).replace("?", second)
    with pytest.raises(
        ProgramDeadlock, match=r"n1/0 waits at 1-1:RECV_F1<n0/0 for n0/0 in order: another"
    ):
        dry_run(parse_programs(swapped), plan)


def test_sums_in_different_orders_are_found() -> None:
    profile = profile_of([1.0, 2.0, 1.0])
    plan = plan_of_templates(generate_templates(profile, range(1, 3)), (1, 1), (1, 1))
    programs = parse_programs(
        "n0/0: SYNC0[2]@n0/0,n1/0 SYNC1[0,1]@n0/0,n1/0 VOTE[0,1,2] STEP\n"
        "n1/0: SYNC1[0,1]@n0/0,n1/0 SYNC0[2]@n0/0,n1/0 VOTE[] STEP\n"
    )
    with pytest.raises(ProgramDeadlock, match="for the sum of bucket 0"):
        dry_run(programs, plan)


def test_program_text_reads_like_this() -> None:
    profile = profile_of([1.0, 1.0, 1.0])
    plan = plan_of_templates(generate_templates(profile, range(1, 3)), (2, 1), (1, 1))
    assert format_programs(compile_programs(plan, tied=True)) == (
        "n0/0: 0-1:LOAD0 0-1:F0 0-1:SEND_F0>n1/0 0-1:RECV_B0<n1/0 0-1:B0 "
        "SYNC0[tied:0]@n0/0,n1/0,n2/0 SYNC2[0,1]@n0/0,n2/0 VOTE[0,tied:0] STEP\n"
        "n1/0: 2-2:LOAD0 2-2:RECV_F0<n0/0 2-2:F0 2-2:B0 2-2:SEND_B0>n0/0 "
        "SYNC0[tied:2]@n0/0,n1/0,n2/0 SYNC1[2]@n1/0,n2/0 VOTE[2] STEP\n"
        "n2/0: 0-2:LOAD1 0-2:F1 0-2:B1 SYNC0[tied:0,tied:2]@n0/0,n1/0,n2/0 "
        "SYNC1[2]@n1/0,n2/0 SYNC2[0,1]@n0/0,n2/0 VOTE[1] STEP\n"
    )


def test_an_empty_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a share is 2:2/4; it must not be empty"):
        Share(2, 2, 4)


def test_every_word_survives() -> None:
    for word in (
        "2-4:RECV_B3<a.b-c/2",
        "0-12:SEND_F7>n0/0",
        "7-7:SEND_B1(1:2/4)>n0/3",
        "VOTE[]",
        "VOTE[0(0:1/2),tied:0(0:1/2)]",
        "SYNC3[4(2:3/6),tied:4(2:3/6)]@n0/0,n1/2",
        "STEP",
        "0-1:LOAD3",
        "1-2:BI3",
        "1-2:BW3",
    ):
        assert format_instruction(parse_instruction(word)) == word

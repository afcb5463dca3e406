"""The three schedules: order, time, memory, and no deadlock whether or not sends block."""

import random
from dataclasses import replace

import pytest

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Forward
from oobleck.core.profile import Links, Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.planner.cost.estimate import estimate_step, worker_peak_bytes
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.planner.programs.compiler.schedule import compute_order, in_flight
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of
from support.program_text import format_programs, parse_programs

#: As if messages took no time.
INSTANT = Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=1e18, latency_s=0.0)
LETTERS = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W"}


def text(schedule: Schedule, stages: int, stage: int, microbatches: int) -> str:
    order = compute_order(schedule, stages=stages, stage=stage, microbatches=microbatches)
    return " ".join(f"{LETTERS[kind]}{microbatch}" for kind, microbatch in order)


def even_profile(layers: int, **fields: object) -> Profile:
    """Forward, input gradient and weight gradient take 1 s each, as in the zero-bubble paper."""
    profile = profile_of([1.0] * layers, links=INSTANT, **fields)  # type: ignore[arg-type]
    split = tuple(replace(layer, backward_input_s={1: 1.0}) for layer in profile.layers)
    return replace(profile, layers=split)


def test_orders_of_four_microbatches_on_three_stages() -> None:
    assert text("1f1b", 3, 0, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text("1f1b", 3, 2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text("gpipe", 3, 1, 4) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert text("zb-h1", 3, 0, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text("zb-h1", 3, 1, 4) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"
    assert text("zb-h1", 3, 2, 4) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_microbatch_is_computed_once_and_in_order(schedule: Schedule) -> None:
    for stages in range(1, 9):
        for stage in range(stages):
            for microbatches in range(1, 17):
                order = list(
                    compute_order(schedule, stages=stages, stage=stage, microbatches=microbatches)
                )
                for kinds in ((Forward,), (Backward, BackwardInput), (Backward, BackwardWeight)):
                    assert [m for kind, m in order if kind in kinds] == list(range(microbatches))
                kept = most = 0
                for kind, _ in order:
                    kept += (kind is Forward) - (kind in (Backward, BackwardWeight))
                    most = max(most, kept)
                assert most == in_flight(
                    schedule, stages=stages, stage=stage, microbatches=microbatches
                )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stages_before_change_only_when_weight_gradients_are_computed(
    schedule: Schedule,
) -> None:
    """What `oobleck.planner.programs.compiler.proof` takes for granted."""
    for microbatches in (1, 3, 9):
        for after in range(5):
            orders = {
                tuple(
                    work
                    for work in compute_order(
                        schedule, stages=stage + 1 + after, stage=stage, microbatches=microbatches
                    )
                    if work[0] is not BackwardWeight
                )
                for stage in range(1, 6)
            }
            assert len(orders) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_further_micro_batch_is_one_more_round(schedule: Schedule) -> None:
    """The same."""
    for after in range(5):
        for microbatches in range(after + 1, after + 9):
            few, more = (
                "".join(
                    "F" if kind is Forward else "B"
                    for kind, _ in compute_order(
                        schedule, stages=after + 2, stage=1, microbatches=count
                    )
                    if kind is not BackwardWeight
                )
                for count in (microbatches, microbatches + 1)
            )
            if schedule == "gpipe":
                assert more == f"F{few}B"
            else:
                assert more == f"{few[:after]}FB{few[after:]}"


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_deadlock(schedule: Schedule, stages: int) -> None:
    for microbatches in range(1, 17):
        plan = plan_of_cuts(([1] * stages, microbatches), schedule=schedule)
        programs = compile_programs(plan, tied=True)
        assert parse_programs(format_programs(programs)) == programs
        dry_run(programs, plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_deadlock_between_stages_of_different_numbers_of_workers(schedule: Schedule) -> None:
    rng = random.Random(3)
    for _ in range(20):
        cuts = [[(1, rng.randint(1, 4)) for _ in range(5)] for _ in range(2)]
        plan = plan_of_cuts((cuts[0], rng.randint(1, 7)), (cuts[1], 3), schedule=schedule)
        programs = compile_programs(plan, tied=True)
        assert parse_programs(format_programs(programs)) == programs
        dry_run(programs, plan)


@pytest.mark.parametrize("stages", [2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_step_times_are_those_of_the_papers(stages: int, microbatches: int) -> None:
    profile = even_profile(stages)
    forward = into = weights = 1.0
    work = microbatches * (forward + into + weights)
    idle = {
        "1f1b": (stages - 1) * (forward + into + weights),
        "gpipe": (stages - 1) * (forward + into + weights),
        # Qi et al., table 2; with fewer micro-batches than stages not all bubbles can be filled.
        "zb-h1": (stages - 1) * (forward + into - weights),
    }
    for schedule in SCHEDULES:
        plan = plan_of_cuts(([1] * stages, microbatches), schedule=schedule)
        run = estimate_step(plan, profile)
        if schedule == "zb-h1" and microbatches < stages:
            assert work + idle["zb-h1"] <= run.step_s <= work + idle["1f1b"]
            continue
        assert run.step_s == pytest.approx(work + idle[schedule])
        assert run.bubble == pytest.approx(1 - work / run.step_s)


def test_zero_bubble_keeps_the_peak_of_the_first_stage_everywhere() -> None:
    stages, microbatches, state, activation = 5, 12, 1000, 7
    profile = even_profile(stages, state=state, activation=activation)
    peaks = {}
    for schedule in SCHEDULES:
        plan = plan_of_cuts(([1] * stages, microbatches), schedule=schedule)
        peaks[schedule] = [peak - state for peak in worker_peak_bytes(plan, profile).values()]
    assert peaks["1f1b"] == [activation * kept for kept in (5, 4, 3, 2, 1)]
    assert peaks["gpipe"] == [activation * microbatches] * stages
    assert peaks["zb-h1"] == [activation * 5] * stages
    assert max(peaks["zb-h1"]) == max(peaks["1f1b"])


def test_backward_without_a_measured_split_takes_the_same_time_in_two() -> None:
    profile = profile_of([1.0, 1.0], links=INSTANT)
    plan = plan_of_cuts(([1, 1], 1), schedule="zb-h1")
    assert estimate_step(plan, profile).step_s == pytest.approx(
        # The first stage's backward need not wait for the second's weight gradients.
        1 + 1 + 2 * 1.3 / 2.3 + 2
    )


def test_a_stage_that_waits_for_forwards_that_the_one_before_holds_back_is_found() -> None:
    cuts = ([1, 1], 4)
    first, second = (
        compile_programs(plan_of_cuts(cuts, schedule=schedule), tied=False)
        for schedule in ("1f1b", "gpipe")
    )
    mixed = {worker(0): first[worker(0)], worker(1): second[worker(1)]}
    with pytest.raises(ProgramDeadlock) as caught:
        dry_run(mixed, plan_of_cuts(cuts))
    assert len(caught.value.waiting) == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_receive_in_front_of_the_send_that_the_peer_needs_is_found(schedule: Schedule) -> None:
    """Both neighbours receive before they send what the other waits for."""
    plan = plan_of_cuts(([1, 1], 3), schedule=schedule)
    text = format_programs(compile_programs(plan, tied=False))
    swapped = text.replace("0-0:SEND_F0>n1/0 0-0:LOAD1 0-0:F1 ", "0-0:LOAD1 0-0:F1 ").replace(
        "0-0:RECV_B0<n1/0 ", "0-0:RECV_B0<n1/0 0-0:SEND_F0>n1/0 "
    )
    assert swapped != text
    with pytest.raises(ProgramDeadlock, match=r"n1/0 waits at 1-1:RECV_F0<n0/0 for n0/0"):
        dry_run(parse_programs(swapped), plan)

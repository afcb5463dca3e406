"""A plan that is proven ends, and one whose programs do not is refused, by pieces of them alone."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.instructions import (
    Backward,
    BackwardInput,
    Compute,
    Forward,
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from oobleck.core.plan import Plan
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.planner.programs.compiler import compile as compiler
from oobleck.planner.programs.compiler import proof
from oobleck.planner.programs.compiler.compile import add_communication, compile_programs
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.planner.programs.compiler.schedule import Work, compute_order
from support.plans import plan_of_cuts

Order = Callable[..., Iterator[Work]]


@pytest.fixture(autouse=True)
def _nothing_is_proven() -> Iterator[None]:
    proof.forget()
    yield
    proof.forget()


def random_plan(rng: random.Random, *, stages: int = 5) -> Plan:
    pipelines = []
    for _ in range(rng.randint(1, 4)):
        ends = sorted(rng.sample(range(1, 8), rng.randint(0, stages - 1)))
        cut = [(b - a, rng.choice([1, 1, 2, 3])) for a, b in pairwise([0, *ends, 8])]
        pipelines.append((cut, rng.randint(1, 14)))
    return plan_of_cuts(*pipelines, schedule=rng.choice(SCHEDULES))


def whole_runs_end(plan: Plan, *, tied: bool) -> bool:
    try:
        dry_run(compile_programs(plan, tied=tied), plan)
    except ProgramDeadlock:
        return False
    return True


@pytest.mark.parametrize("tied", [False, True])
def test_proven_plans_end(tied: bool) -> None:
    rng = random.Random(1)
    for _ in range(60):
        plan = random_plan(rng)
        proof.prove(plan)
        assert whole_runs_end(plan, tied=tied)


def has(name: str, value: int, places: dict[str, int]) -> bool:
    return {**places, "after": stages_after(places)}[name] == value


def stages_after(places: dict[str, int]) -> int:
    return places["stages"] - 1 - places["stage"]


def one_stage_follows_another_schedule(after: int, other: Schedule) -> Order:
    def order(schedule: Schedule, **places: int) -> Iterator[Work]:
        return compute_order(other if stages_after(places) == after else schedule, **places)

    return order


def one_stage_goes_backwards(at: Callable[[dict[str, int]], bool]) -> Order:
    """It takes the newest micro-batch first."""

    def order(schedule: Schedule, **places: int) -> Iterator[Work]:
        last = places["microbatches"] - 1
        for kind, microbatch in compute_order(schedule, **places):
            yield kind, last - microbatch if at(places) else microbatch

    return order


@pytest.mark.parametrize("seed", range(20))
def test_what_waits_for_ever_is_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the run of all programs does not end, the proof of pieces does not either."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(15):
        after, stage = rng.randint(0, 2), rng.randint(0, 4)
        faults = (
            one_stage_follows_another_schedule(after, rng.choice(SCHEDULES)),
            one_stage_goes_backwards(partial(has, "after", after)),
            one_stage_goes_backwards(partial(has, "stage", stage)),
        )
        fault = rng.choice(faults)
        monkeypatch.setattr(compiler, "compute_order", fault)
        monkeypatch.setattr(proof, "compute_order", fault)
        plan = random_plan(rng)
        proof.forget()
        if not whole_runs_end(plan, tied=True):
            refused += 1
            with pytest.raises(ProgramDeadlock, match="waits at"):
                proof.prove(plan)
    assert refused


def one_kind_of_message_is_left_out(kind: type[Message]) -> Callable[..., Iterator[Instruction]]:
    def add(*told: Any, **named: Any) -> Iterator[Instruction]:
        return (step for step in add_communication(*told, **named) if not isinstance(step, kind))

    return add


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [SendActivation, ReceiveActivation, SendGradient, ReceiveGradient])
def test_every_kind_of_message_is_seen_to_find_its_receiver(
    schedule: Schedule, kind: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under GPipe, where neighbours compute alike from end to end."""
    plan = plan_of_cuts(([(3, 2), (3, 3), 2], 6), schedule=schedule)
    proof.prove(plan)
    fault = one_kind_of_message_is_left_out(kind)
    monkeypatch.setattr(compiler, "add_communication", fault)
    monkeypatch.setattr(proof, "add_communication", fault)
    proof.forget()
    waits = not whole_runs_end(plan, tied=True)
    assert waits == (kind in (SendActivation, SendGradient))
    if waits:
        with pytest.raises(ProgramDeadlock, match="waits at"):
            proof.prove(plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [Forward, BackwardInput, Backward])
def test_a_stage_that_leaves_a_micro_batch_out_is_refused(
    schedule: Schedule, kind: type[Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(schedule: Schedule, **places: int) -> Iterator[Work]:
        left_out = (kind, 1) if places["stage"] == 1 else None
        return (work for work in compute_order(schedule, **places) if work != left_out)

    monkeypatch.setattr(compiler, "compute_order", order)
    monkeypatch.setattr(proof, "compute_order", order)
    plan = plan_of_cuts(([3, 3, 2], 6), schedule=schedule)
    if whole_runs_end(plan, tied=True):  # the schedule has no such compute
        proof.prove(plan)
    else:
        with pytest.raises(ProgramDeadlock, match="waits at"):
            proof.prove(plan)

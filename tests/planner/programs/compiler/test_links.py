"""Every link first-in-first-out: receives move only where they must, and nobody waits for ever."""

import random
from collections.abc import Sequence

import pytest

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.compile import receives_hoisted
from oobleck.planner.programs.compiler.proof import dry_run
from oobleck.planner.programs.listing.schedule import list_schedule
from support.routes import (
    equal_pipelines,
    least_room,
    random_plan,
    random_ticks,
    with_messages,
)

Programs = dict[WorkerId, list[Instruction]]


def random_programs(seed: int) -> tuple[Plan, Programs]:
    rng = random.Random(seed)
    plan, ticks = random_plan(rng), random_ticks(rng)
    room = {w: least + rng.randint(0, 30) for w, least in least_room(plan, ticks).items()}
    schedule = list_schedule(plan, ticks, room, split=rng.random() < 0.7, budget_visits=0)
    return plan, with_messages(plan, schedule)


def receives(program: Sequence[Instruction]) -> list[Message]:
    return [s for s in program if isinstance(s, ReceiveActivation | ReceiveGradient)]


def sends(program: Sequence[Instruction]) -> list[Message]:
    return [s for s in program if isinstance(s, SendActivation | SendGradient)]


def before_compute(program: Sequence[Instruction]) -> list[tuple[Instruction, list[Message]]]:
    """Each instruction but receives, with the receives right before it."""
    found, waiting = [], []
    for step in program:
        if isinstance(step, ReceiveActivation | ReceiveGradient):
            waiting.append(step)
        else:
            found.append((step, waiting))
            waiting = []
    assert not waiting
    return found


@pytest.mark.parametrize("seed", range(80))
def test_links_are_first_in_first_out_and_nobody_waits_for_ever(seed: int) -> None:
    plan, naive = random_programs(seed)
    hoisted = receives_hoisted(naive)
    dry_run({worker: tuple(program) for worker, program in hoisted.items()}, plan)
    for worker, program in hoisted.items():
        for peer in hoisted:
            received = [step.content for step in receives(program) if step.peer == peer]
            sent = [step.content for step in sends(hoisted[peer]) if step.peer == worker]
            assert received == sent


@pytest.mark.parametrize("seed", range(80))
def test_a_receive_is_as_late_as_that_allows(seed: int) -> None:
    _, naive = random_programs(seed)
    for worker, program in receives_hoisted(naive).items():
        place = {
            step.content: number
            for peer in naive
            for number, step in enumerate(
                step for step in sends(naive[peer]) if step.peer == worker
            )
        }
        wanted = before_compute(naive[worker])
        got = before_compute(program)
        assert [step for step, _ in got] == [step for step, _ in wanted]
        for (_, found), (_, needed) in zip(got, wanted, strict=True):
            for early in found:
                assert any(
                    step.peer == early.peer and place[step.content] >= place[early.content]
                    for step in needed
                )


def test_without_that_some_would() -> None:
    stuck = 0
    for seed in range(80):
        plan, naive = random_programs(seed)
        try:
            dry_run({worker: tuple(program) for worker, program in naive.items()}, plan)
        except ProgramDeadlock:
            stuck += 1
    assert stuck > 5


def test_a_receive_that_nobody_sends_stays_for_the_dry_run() -> None:
    plan = equal_pipelines(1, 2, 1)
    first, second = plan.workers
    missing = ReceiveActivation(microbatch=0, first_layer=1, last_layer=1, peer=first)
    hoisted = receives_hoisted({first: [], second: [missing]})
    assert hoisted == {first: [], second: [missing]}
    with pytest.raises(ProgramDeadlock, match="RECV_F0"):
        dry_run({worker: tuple(program) for worker, program in hoisted.items()}, plan)

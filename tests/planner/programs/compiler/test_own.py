"""A worker's own part of a plan's programs is what the whole of them has for it."""

import random
import sys
from types import FrameType

import pytest

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Action, Message
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.compile import (
    Work,
    compile_evaluation,
    compile_programs,
    spread,
)
from oobleck.planner.programs.compiler.gradients import BUCKET_BYTES
from oobleck.planner.programs.compiler.own import OwnProgram, compile_own, compile_own_evaluation
from support.routes import equal_pipelines, random_listed, random_pipelines


def some_plan(draw: random.Random) -> Plan:
    """Of templates, some of whose stages several workers share, or of listed routes."""
    return random_pipelines(draw) if draw.random() < 0.5 else random_listed(draw)


def some_work(draw: random.Random, plan: Plan) -> Work | None:
    """A whole step, or what is left of one."""
    if draw.random() < 0.3:
        return None
    left = sorted(draw.sample(range(plan.microbatches), draw.randint(0, plan.microbatches)))
    lowest = {m: draw.randint(0, plan.layer_count) for m in left if draw.random() < 0.7}
    return Work(microbatches=spread(left, plan), lowest=lowest)


@pytest.mark.parametrize("seed", range(150))
def test_a_step_is_the_same(seed: int) -> None:
    draw = random.Random(seed)
    plan = some_plan(draw)
    work, tied = some_work(draw, plan), draw.random() < 0.5
    sizes = [draw.choice([1, BUCKET_BYTES]) for _ in range(plan.layer_count)]
    layer_bytes = draw.choice([None, sizes])
    whole = compile_programs(plan, tied=tied, layer_bytes=layer_bytes, work=work)
    for worker in plan.workers:
        own = compile_own(plan, worker, tied=tied, layer_bytes=layer_bytes, work=work)
        assert own == OwnProgram.of(worker, whole), worker


@pytest.mark.parametrize("seed", range(60))
def test_an_evaluation_is_the_same(seed: int) -> None:
    draw = random.Random(seed)
    plan, count = some_plan(draw), draw.randint(1, 60)
    whole = compile_evaluation(plan, count)
    for worker, rounds in whole.items():
        own = compile_own_evaluation(plan, count, worker)
        assert [each.program for each in own] == list(rounds)
        for number, each in enumerate(own):
            for peer, theirs in each.peers.items():
                others = whole[peer][number] if number < len(whole[peer]) else ()
                assert list(theirs) == exchanged(others, worker)


def exchanged(program: tuple, worker: WorkerId) -> list[Message]:
    return [step for step in program if isinstance(step, Message) and step.peer == worker]


def test_what_one_worker_compiles_does_not_grow_with_the_pipelines() -> None:
    few, many = (equal_pipelines(pipelines, 4, 8) for pipelines in (3, 60))
    for stage in range(4):
        assert (
            0
            < instructions_made(few, few.workers[stage])
            == instructions_made(many, many.workers[stage])
        )


def instructions_made(plan: Plan, worker: WorkerId) -> int:
    made = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal made
        if event == "call" and frame.f_code.co_name == "__init__":
            made += isinstance(frame.f_locals.get("self"), Action)

    sys.setprofile(look)
    try:
        compile_own(plan, worker, tied=True)
        compile_own_evaluation(plan, 2 * plan.microbatches, worker)
    finally:
        sys.setprofile(None)
    return made

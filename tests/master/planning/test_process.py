"""Plans that another process makes: real ones, and what becomes of them when it is killed."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
from msgspec.structs import replace

from oobleck.core.ids import Generation
from oobleck.master.planning.process import PlanningProcess
from oobleck.master.planning.requests import (
    Broken,
    FirstPlanRequest,
    Infeasible,
    Machines,
    NextPlanReply,
    NextPlanRequest,
    PlanReply,
    StillPlanning,
)
from oobleck.master.planning.solve import work_out
from support import loops
from support.trained import node, trained_job

LIMIT_S = 120.0


@asynccontextmanager
async def planner() -> AsyncIterator[PlanningProcess]:
    process = PlanningProcess()
    running = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        running.cancel()
        await asyncio.wait((running,))


async def reply(process: PlanningProcess, request: FirstPlanRequest | NextPlanRequest) -> PlanReply:
    """As the loop asks: want it, wait to be told, ask again."""
    told = asyncio.Event()
    process.listen(told.set)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return process.reply(request)
            except StillPlanning as still:
                process.want(still.request)
            await told.wait()
            told.clear()


NODES = [node(number) for number in range(1, 7)]
STATE, THE_JOB = trained_job(NODES, hidden=34)


def first(nodes: int) -> FirstPlanRequest:
    return FirstPlanRequest(
        spec=THE_JOB.spec,
        machines=Machines.of(THE_JOB, NODES),
        nodes=tuple(one.facts.node for one in NODES[:nodes]),
        generation=Generation(1),
    )


def children() -> set[int]:
    """Of this process, those that make plans."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if any("planning.worker" in word for word in child.cmdline()):
                found.add(child.pid)
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - no event tells of other processes
            await asyncio.sleep(0.01)


def test_answers_are_those_of_the_planner_and_a_killed_process_is_replaced() -> None:
    async def play() -> None:
        async with planner() as process:
            for nodes in (6, 1):
                assert await reply(process, first(nodes)) == work_out(first(nodes))
            assert isinstance(process.reply(first(1)), Infeasible)
            before = children()
            assert len(before) == 1
            os.kill(before.pop(), signal.SIGKILL)
            assert THE_JOB.current.made is not None
            request = NextPlanRequest(
                spec=THE_JOB.spec,
                machines=first(6).machines,
                plan=THE_JOB.current.made.plan,
                base=None,
                wanted="auto",
                nodes=first(6).nodes[1:],
                most_nodes=6,
                generation=Generation(2),
            )
            expected = work_out(request)
            assert isinstance(expected, NextPlanReply)
            assert await reply(process, request) == expected
        await until(lambda: not children())

    loops.run(play())


def test_a_process_that_does_not_answer_is_replaced() -> None:
    async def play() -> None:
        async with planner() as process:
            assert await reply(process, first(1)) == work_out(first(1))
            (stuck,) = children()
            os.kill(stuck, signal.SIGSTOP)
            process.longest_s = 0.1
            process.want(first(6))
            process.longest_s = LIMIT_S  # of the next one, which has to start first
            assert await reply(process, first(6)) == work_out(first(6))
            assert stuck not in children()

    loops.run(play())


def test_a_question_that_no_process_survives_is_answered_as_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def play() -> None:
        async with planner() as process:
            found = await reply(process, first(6))
            assert found == Broken(error="the planning process ended with exit code 1")

    loops.run(play())


def test_what_is_foreseen_is_there_when_it_is_asked_for_and_tells_nobody() -> None:
    async def play() -> None:
        async with planner() as process:
            told = asyncio.Event()
            assert await reply(process, first(6)) == work_out(first(6))
            process.listen(told.set)
            process.longest_ahead_s = LIMIT_S
            foreseen = (first(5), first(4))
            process.foresee(foreseen)
            for request in foreseen:
                async with asyncio.timeout(LIMIT_S):
                    while True:
                        with contextlib.suppress(StillPlanning):
                            assert process.reply(request) == work_out(request)
                            break
                        await asyncio.sleep(0.01)
            assert not told.is_set()
            process.foresee((first(3),))
            # What is wanted goes before what is foreseen, and is told.
            assert await reply(process, first(2)) == work_out(first(2))
            # Where the last one took too long, none is made ahead.
            process.longest_ahead_s = 0.0
            later = tuple(replace(one, generation=Generation(2)) for one in foreseen)
            process.foresee(later)
            assert await reply(process, first(1)) == work_out(first(1))
            for one in later:
                with pytest.raises(StillPlanning):
                    process.reply(one)

    loops.run(play())

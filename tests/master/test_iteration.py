"""Iterations of a real master: what stops in the middle of one, and who is gone before it."""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.host.system.environment import Environment
from oobleck.master.inbox import Output, Records
from oobleck.master.loop import Master
from oobleck.master.rules.admission import Refusal
from oobleck.master.state.trust import Denied, Trust
from oobleck.proto.types import NodeStatus, Registration
from support import loops, masters
from support.agent import Agent, facts
from support.jobs import job_spec, record
from support.live_agent import LocalAgent

#: Longer than any lease.
PAUSE_S = 600.0
N1 = NodeName("n1")
FACTS = facts(N1)


class Clock:
    """Goes on by itself, and jumps ahead as the clock of a process does that was stopped."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def jump(self, seconds: float = PAUSE_S) -> None:
        self._ahead_s += seconds


def running(state_dir: Path, clock: Clock) -> AbstractAsyncContextManager[Master]:
    return masters.running(state_dir, environment=replace(Environment(), now=clock))


def registration() -> Registration:
    return Agent(FACTS).registration()


async def turned(master: Master) -> None:
    """All that was asked before has been decided on."""
    for _ in range(2):
        await master.requests.undrain("r", NodeName("nobody"))


async def opened(master: Master) -> LocalAgent:
    return await LocalAgent.admitted(master, FACTS)


async def trained(master: Master) -> tuple[LocalAgent, JobId]:
    """Submit a job, and return once it has a plan, of the one node."""
    agent = await opened(master)
    job_id = await master.requests.submit("r1", job_spec("demo", f=0, min_nodes=1))
    agent.change(job_id=job_id)
    agent.worker(0, incarnation=Incarnation("w1"), pid=2, card="n1:4000")
    await agent.tell()
    while master.state.jobs[job_id].current.made is None:
        await turned(master)
    return agent, job_id


async def is_there(master: Master) -> None:
    """What a pause may have led to is decided, and the node is not lost."""
    await turned(master)
    node = master.state.nodes[N1]
    assert node.connected, node.reason


def test_a_master_that_is_stopped_in_its_turn_convicts_nobody(tmp_path: Path) -> None:
    async def play() -> None:
        clock = Clock()

        def stop(trust: Trust, unix: float) -> NoReturn:
            clock.jump()
            raise Denied("nothing is to be changed")

        async with running(tmp_path, clock) as master:
            await opened(master)
            with pytest.raises(Denied):
                await master.requests.change_trust(stop)
            await is_there(master)

    loops.run(play())


def test_what_is_wrong_with_a_node_when_it_is_undrained_is_journaled(tmp_path: Path) -> None:
    async def play() -> None:
        async with running(tmp_path, Clock()) as master:
            agent = await opened(master)
            await agent.say(NodeStatus(sick="GPU 0: lost\nGPU 1: lost"))
            await master.requests.undrain("u", N1)
            assert master.state.nodes[N1].excused == {"GPU 0: lost", "GPU 1: lost"}
        async with running(tmp_path, Clock()) as master:
            await turned(master)
            assert master.state.nodes[N1].excused == {"GPU 0: lost", "GPU 1: lost"}

    loops.run(play())


def test_what_came_just_before_a_pause_says_nothing_about_it(tmp_path: Path) -> None:
    async def play() -> None:
        clock = Clock()
        async with running(tmp_path, clock) as master:
            agent = await opened(master)
            await agent.say(NodeStatus())
            clock.jump()
            await is_there(master)

    loops.run(play())


def test_an_agent_that_is_gone_before_its_turn_has_no_session(tmp_path: Path) -> None:
    async def play() -> None:
        async with running(tmp_path, Clock()) as master:
            asking = asyncio.create_task(master.sessions.open(registration()))
            await asyncio.sleep(0)  # its registration waits for the iteration
            asking.cancel()
            while N1 not in master.state.nodes or master.state.nodes[N1].connected:
                await turned(master)
            assert not list(master.sessions)

    loops.run(play())


def test_a_checkpoint_of_a_job_that_was_just_forgotten_is_none(tmp_path: Path) -> None:
    async def play() -> None:
        async with running(tmp_path, Clock()) as master:
            assert await master.requests.save("r1", JobId("gone-1")) == 0
            await turned(master)  # and the master goes on

    loops.run(play())


def test_a_job_is_known_to_have_records_that_wait_for_others(tmp_path: Path) -> None:
    async def play() -> None:
        async with running(tmp_path, Clock()) as master:
            agent, job_id = await trained(master)
            for step, waits in ((2, True), (1, False)):
                found = Records(job_id=job_id, records=(record(step, 1, float(step)),))
                await agent.say(found)
                await turned(master)
                assert master.state.jobs[job_id].seen.steps.records_wait == waits

    loops.run(play())


def test_a_node_has_so_much_output_kept_and_only_of_its_jobs(tmp_path: Path) -> None:
    async def play() -> None:
        clock = Clock()
        async with running(tmp_path, clock) as master:
            agent, job_id = await trained(master)
            other = await master.requests.submit("r2", job_spec("other", f=0, min_nodes=1))
            lines = 64 * ("x" * 4096,)

            async def say(of: JobId, *lines: str) -> None:
                await agent.say(Output(job_id=of, slot=0, lines=lines))

            for _ in range(100):
                await say(job_id, *lines)
            await say(other, "not mine")
            await turned(master)
            clock.jump(1.0)
            await say(job_id, "later")
            await turned(master)
            kept = list(master.archive.logs.snapshot(job_id, lambda worker: True))
            found = [line.text for line in kept]
            assert found[-2:] == ["[2304 lines were dropped here: too many at once]", "later"]
            assert not list(master.archive.logs.snapshot(other, lambda worker: True))

    loops.run(play())


def test_a_node_registers_so_often_and_no_more(tmp_path: Path) -> None:
    async def play() -> None:
        clock = Clock()
        async with running(tmp_path, clock) as master:
            found = [await master.sessions.open(registration()) for _ in range(40)]
            refused = [one for one in found if isinstance(one, Refusal)]
            assert 0 < len(refused) <= 10
            assert "more often than once a second" in refused[0].reason
            assert refused[0].temporary
            clock.jump(2.0)
            await opened(master)

    loops.run(play())


def test_records_behind_lost_ones_count_and_are_acknowledged(tmp_path: Path) -> None:
    clock = Clock()

    async def play() -> None:
        async with running(tmp_path, clock) as master:
            agent, job_id = await trained(master)
            found = (record(4, 1, 4.0), record(5, 1, 5.0))
            await agent.say(Records(job_id=job_id, records=found))
            while master.archive.metrics(job_id).stored_step < 5:
                clock.jump(0.2)  # less than what counts as late
                await turned(master)
            assert master.state.jobs[job_id].seen.steps.committed_step == 5

    loops.run(play())

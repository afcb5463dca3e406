"""A master that dies as by `kill -9` at any point of an iteration, and the one that follows it.

Real processes and the real protocol; only the workers are made up. Whatever the point, the history
is whole: every step once, every event once, and the job goes on in the generation it was in or the
one after.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.support.client import read_lines
from oobleck.core.ids import JobId
from oobleck.core.messages import Evaluated
from oobleck.master.events.jobs import JobWaiting
from oobleck.master.storage.journal import Journal
from oobleck.proto import control_pb2 as pb
from support import loops
from support.jobs import evaluation, record
from support.live_agent import FakeAgent
from support.masters import DEADLINE_S, QUICK, MasterProcess, master, operator
from support.scenario import UNIX, Player

JOB = (
    "name: demo\nmodel: {kind: gpt, layers: 6, hidden: 32, heads: 2, sequence_length: 16}\n"
    "data: {text: [/nowhere]}\nprofile: estimate\nfault_tolerance: 1\n"
    "training: {steps: 30, global_batch: 16, microbatch: 2}\n"
    "evaluation: {every: 10, fraction: 0.1}\n"
)


def lines(state: Path, name: str) -> list[dict]:
    path = state / "jobs" / "demo-1" / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Drill:
    """A cluster of made-up agents whose master may die at any moment, and is started again."""

    def __init__(self, state: Path, crash_at: tuple[str, ...]) -> None:
        """The first master dies at the first point, the next one at the second, and so on."""
        self.state = state
        self.points = list(crash_at)
        self.master = MasterProcess(state, *self.next_point())
        self.address = self.master.address
        self.crashes = 0
        self.agents = [FakeAgent(f"n{number}") for number in range(1, 4)]

    def next_point(self) -> tuple[str, ...]:
        return ("--crash-at", self.points.pop(0)) if self.points else ()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Keep all going until it holds: bring up the master, connect who is cut off."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if self.master.process.poll() is not None:
                    self.crashes += 1
                    self.master.close()
                    self.master = MasterProcess(self.state, *self.next_point(), listen=self.address)
                for agent in self.agents:
                    if agent.ended is not None or agent.welcome is None:
                        await agent.disconnect()
                        await agent.connect(self.address)
                if condition():
                    return
                # What is not known to be stored is told again each time.
                await asyncio.sleep(0.1)

    async def play(self) -> None:
        agents = self.agents
        await self.submit()
        await self.until(lambda: all(a.assignments and a.assignments[-1].job_id for a in agents))
        for agent in agents:
            agent.workers()
        await self.until(lambda: all(a.planned == 1 for a in agents))
        for agent in agents:
            agent.workers(1)
        await self.train(agents, 1, 10, 1)
        await self.evaluate(agents, 10, 1)
        lost = agents.pop()
        await lost.disconnect()
        await self.until(lambda: self.complained(agents) >= 2)
        generation = agents[0].planned
        for agent in agents:
            agent.workers(generation)
        await self.train(agents, 11, 30, generation)
        await self.evaluate(agents, 30, generation)  # a job's end waits for that of its last step
        for agent in agents:
            agent.workers(generation, finished=True)
        await self.until(
            lambda: any(e["event"] == "succeeded" for e in lines(self.state, "events.jsonl")),
        )

    def complained(self, agents: list[FakeAgent]) -> int:
        """The survivors tell every master that they lost a peer; the newest generation all know."""
        told = min(agent.planned for agent in agents)
        if told == 1:
            for agent in agents:
                if agent.welcome is not None and agent.ended is None:
                    agent.lost_peer(1)
        return told

    async def submit(self) -> None:
        """As often as it takes: the request has an id."""

        async def once() -> bool:
            try:
                async with operator(self.address) as control:
                    request = pb.SubmitRequest(request_id="r", job=JOB)
                    assert (await control.Submit(request, timeout=240)).job_id == "demo-1"
            except Exception as error:
                if isinstance(error, AssertionError):
                    raise
                return False
            return True

        async with asyncio.timeout(DEADLINE_S):
            done = False
            while not done:
                await self.until(lambda: True)
                done = await once()

    async def train(self, agents: list[FakeAgent], first: int, last: int, generation: int) -> None:
        told = tuple(record(step, generation, float(step)) for step in range(first, last + 1))

        def stored() -> bool:
            for agent in agents:  # all that is not known to be stored is told again
                left = [r for r in told if r.step > agent.acks.get("demo-1", 0)]
                if left and agent.welcome is not None and agent.ended is None:
                    agent.records("demo-1", *left)
            return any(agent.acks.get("demo-1", 0) >= last for agent in agents)

        await self.until(stored)

    async def evaluate(self, agents: list[FakeAgent], step: int, generation: int) -> None:
        """All tell of the same evaluation, until it is stored."""
        found = evaluation(step, generation, 10.0)

        def stored() -> bool:
            told = read_lines(self.state / "jobs" / "demo-1" / "evaluations.jsonl")
            if told and told[-1]["step"] == step:
                return True
            for agent in agents:
                if agent.welcome is not None and agent.ended is None:
                    agent.send_report(Evaluated(record=found))
            return False

        await self.until(stored)

    async def end(self) -> None:
        for agent in self.agents:
            await agent.disconnect()


@pytest.mark.parametrize(
    "crash_at",
    [
        ("journal-torn:3", "told:2", "events-torn:2"),
        ("applied:6", "evaluations-torn:1", "committed:1", "metrics-torn:1"),
    ],
    ids=lambda points: points[0],
)
def test_killed_at_any_point_of_a_turn_nothing_is_lost_and_nothing_comes_twice(
    tmp_path: Path, crash_at: tuple[str, ...]
) -> None:
    drill = Drill(tmp_path / "state", crash_at)

    async def test() -> None:
        try:
            await drill.play()
        finally:
            await drill.end()

    try:
        loops.run(test())
    finally:
        drill.master.close()
    assert drill.crashes == len(crash_at), "a point was not reached"
    events = lines(drill.state, "events.jsonl")
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    metrics = lines(drill.state, "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 31))
    names = [event["event"] for event in events if event["event"] != "journal_cut"]
    for once in ("submitted", "started", "succeeded"):
        assert names.count(once) == 1, names
    changes = [event for event in events if event["event"] == "reconfigured"]
    assert [event["to_generation"] for event in changes] == [2]
    assert [event["incident"] for event in events if event["event"] == "incident"] == [1]
    evaluations = lines(drill.state, "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [10, 30]
    torn = crash_at[0].startswith("journal-torn")
    assert ("the end of the journal was not whole" in drill.master.errors.read_text()) == torn
    assert "Traceback" not in drill.master.errors.read_text()


@pytest.mark.parametrize("point", ["snapshot-written", "snapshot-placed"])
def test_killed_while_a_snapshot_takes_the_journals_place_nothing_is_lost(
    tmp_path: Path, point: str
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    player = Player()
    player.play("0.0 submit demo\n")
    with contextlib.closing(Journal(state / "journal.log")) as journal:
        for unix, event in player.journal:
            journal.append(event, unix)
        for number in range(300):  # more than is kept without a snapshot
            causes = (str(number), "x" * 8000)
            journal.append(JobWaiting(job_id=JobId("demo-1"), causes=causes), UNIX + number)
        journal.commit()
    full = (state / "journal.log").stat().st_size
    command = [sys.executable, "-m", "oobleck.master", "--listen", "127.0.0.1:0", *QUICK]
    ended = subprocess.run(
        [*command, "--state-dir", str(state), "--crash-at", f"{point}:1"],
        capture_output=True,
        timeout=240,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr

    async def ask(address: str) -> None:
        async with operator(address) as control:
            status = await control.GetJob(pb.JobRequest(job_id="demo-1"), timeout=240)
            assert status.state == "waiting for nodes"

    with master(state) as running:
        loops.run(ask(running.address))
    assert (state / "journal.log").stat().st_size < full / 10
    events = lines(state, "events.jsonl")
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    reasons = [event["reason"][:4].partition(";")[0] for event in events[-302:]]
    assert [r for r in reasons if r.isdigit()] == [str(number) for number in range(300)]

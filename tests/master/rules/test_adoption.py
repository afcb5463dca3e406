"""A job whose plan the journal does not have any more goes on: its agents tell what they run.

A real master and the real protocol; only the workers are made up.
"""

import asyncio
import json
from pathlib import Path

import pytest

from oobleck.agent.connection.reports import newest_plan
from oobleck.core.ids import Generation, JobId, NodeName, WorkerId
from oobleck.core.messages import Assign, Rendezvous
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold
from oobleck.proto import control_pb2 as pb
from oobleck.proto.types import Assignment
from support import loops
from support.jobs import job_spec, record
from support.live_agent import FakeAgent, told
from support.masters import DEADLINE_S, MasterProcess, operator

JOB = (
    "name: demo\nmodel: {kind: gpt, layers: 6, hidden: 32, heads: 2, sequence_length: 16}\n"
    "data: {text: [/nowhere]}\nprofile: estimate\nfault_tolerance: 1\n"
    "training: {steps: 30, global_batch: 16, microbatch: 2}\n"
)


def cut_before(journal: Path, event: str) -> None:
    """Without all from the first event of that kind on."""
    lines = journal.read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if f'"type":"{event}"' in line)
    journal.write_text("".join(lines[:first]) + lines[first][:20])


@pytest.mark.parametrize("lost_since", ["PlanMade", "NodeRegistered"])
def test_a_journal_without_the_plan_costs_the_job_no_worker_and_no_generation(
    tmp_path: Path, lost_since: str
) -> None:
    state = tmp_path / "state"
    agents = [FakeAgent(f"n{number}") for number in range(1, 4)]
    before = MasterProcess(state)
    address = before.address

    async def begin() -> None:
        async with operator(address) as control:
            await control.Submit(pb.SubmitRequest(request_id="r", job=JOB), timeout=240)
        for agent in agents:
            await agent.connect(address)
        for agent in agents:
            await agent.until(lambda a=agent: a.assignments and a.assignments[-1].job_id)
            agent.workers()
        for agent in agents:
            await agent.until(lambda a=agent: a.planned == 1)
            agent.workers(1)
        told(agents, "demo-1", *(record(step, 1, float(step)) for step in range(1, 6)))
        await agents[0].until(lambda: agents[0].acks.get("demo-1") == 5)
        before.process.kill()
        before.process.wait()
        for agent in agents:
            await agent.disconnect()

    async def go_on() -> None:
        for agent in agents:
            agent.assignments.clear()
            await agent.connect(address)
        for agent in agents:
            await agent.until(lambda a=agent: a.planned == 1)
            agent.workers(1, finished=True)
        told(agents, "demo-1", *(record(step, 1, float(step)) for step in range(6, 31)))
        async with operator(address) as control, asyncio.timeout(DEADLINE_S):
            async for status in control.WatchJob(pb.JobRequest(job_id="demo-1")):
                last = status
        assert (last.state, last.generation) == ("succeeded", 1)
        assert all(a.job_id == "demo-1" for agent in agents for a in agent.assignments[:-1])
        for agent in agents:
            await agent.disconnect()

    async def play() -> None:
        await begin()
        cut_before(state / "journal.log", lost_since)
        after = MasterProcess(state, listen=address)
        try:
            await go_on()
        finally:
            after.close()

    try:
        loops.run(play())
    finally:
        before.close()
    events = [
        json.loads(line)
        for line in (state / "jobs" / "demo-1" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert "journal_cut" in [event["event"] for event in events]
    metrics = (state / "jobs" / "demo-1" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, 31))


def assignment(job: str | None, generation: int = 0) -> Assignment:
    stage = Hold(first_layer=0, last_layer=1, workers=(WorkerId(NodeName("n1"), 0),))
    pipeline = Pipeline(nodes=(NodeName("n1"),), stages=(stage,), microbatches=1)
    plan = Plan.of_pipelines([pipeline], generation=Generation(generation), schedule="1f1b")
    meeting = Rendezvous(host="127.0.0.1:4001", prefix="p")
    assign = Assign(plan=plan, rendezvous=meeting, boundary=False) if generation else None
    return Assignment(
        version=1, job_id=JobId(job) if job else None, job=job_spec("demo"), assign=assign
    )


def test_an_agent_tells_of_the_newest_plan_that_it_had_of_its_job() -> None:
    def told(known: Assignment | None, newer: Assignment) -> tuple[str | None, int] | None:
        found = newest_plan(known, newer)
        if found is None or found.assign is None:
            return None
        assert found.job is None
        return found.job_id, found.generation

    assert told(None, assignment("a")) is None
    assert told(None, assignment("a", 2)) == ("a", 2)
    known = newest_plan(None, assignment("a", 2))
    assert told(known, assignment("a", 3)) == ("a", 3)
    assert told(known, assignment("a", 1)) == ("a", 2)
    assert told(known, assignment("a")) == ("a", 2)
    assert told(known, assignment("b")) is None
    assert told(known, assignment("b", 1)) == ("b", 1)
    assert told(known, assignment(None)) is None

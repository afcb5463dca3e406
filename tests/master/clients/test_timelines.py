"""How recordings are gathered: the clocks they come with, and wishes that come too late."""

import asyncio
import contextlib
import json
import time

import msgspec
import pytest
from simulation.clockwork import VirtualLoop

from oobleck.agent.connection.outbox import Outbox
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.messages import Recording, Rendezvous, Span
from oobleck.host.versions import ENGINE
from oobleck.master.clients.outbox import AgentSession, Budget
from oobleck.master.clients.timelines import NoTimeline, Timelines, round_trip
from oobleck.master.events.jobs import PlanMade
from oobleck.master.state.job import Job
from oobleck.proto import control_pb2 as pb
from support import loops
from support.jobs import job_spec, record
from support.plans import plan_of_cuts

PLAN = plan_of_cuts(([3, 5], 8))
NODES = ("n0", "n1")


def running_job() -> Job:
    job = Job(
        id=JobId("demo-1"),
        request_id="r",
        spec=job_spec("demo", steps=100_000),
        state="running",
        submitted_at=0.0,
    )
    job.current.made = PlanMade(
        job_id=job.id,
        plan=PLAN,
        rendezvous=Rendezvous(host="", prefix=""),
        boundary=False,
        incarnations=(),
        cause="start",
        rule="",
        reason="",
        nodes_lost=(),
        workers_lost=(),
        nodes_joined=(),
        can_lose=0,
        worker_slots=2,
        detect_s=0.0,
        engine=ENGINE,
    )
    job.seen.steps.recent.append(record(7, 1, 0.0))
    return job


def recording(wish: pb.Record, *, late: bool) -> Recording:
    steps = () if late else tuple(range(wish.first_step, wish.last_step + 1))
    spans = () if late else (Span(f"step {steps[0]}", "step", 1_000, 10_000),)
    return Recording(number=wish.number, generation=Generation(1), steps=steps, spans=spans)


async def answer(timelines: Timelines, session: AgentSession, late: int) -> list[int]:
    """An agent of one worker, whose clock is an hour ahead and which hears the first `late`
    wishes too late; returns the first steps that it was asked for."""
    asked: list[int] = []
    while True:
        for message in await session.outgoing():
            match message.WhichOneof("body"):
                case "clock":
                    ahead_ns = time.monotonic_ns() + 3600 * 10**9
                    read = pb.ClockRead(number=message.clock.number, monotonic_ns=ahead_ns)
                    timelines.clock_read(session.node, read)
                case "record":
                    asked.append(message.record.first_step)
                    found = recording(message.record, late=len(asked) <= late)
                    told = pb.Recorded(
                        job_id="demo-1", recording=msgspec.json.encode(found).decode()
                    )
                    timelines.take_recording(session.node, told)
                    if len(asked) > late:
                        return asked


def sessions(*nodes: str) -> list[AgentSession]:
    return [
        AgentSession(
            number=number, node=NodeName(node), incarnation=Incarnation(node), pace=Budget(1.0, 1.0)
        )
        for number, node in enumerate(nodes)
    ]


def test_wish_that_came_too_late_is_repeated_with_more_time() -> None:
    async def run() -> tuple[bytes, list[list[int]]]:
        there = sessions(*NODES)
        timelines = Timelines(lambda: there)
        agents = [
            asyncio.create_task(answer(timelines, session, late))
            for session, late in zip(there, (1, 1), strict=True)
        ]
        trace = await timelines.trace(running_job(), steps=2)
        return trace, [await agent for agent in agents]

    began = time.monotonic()
    text, asked = loops.run(run())
    took_us = 1e6 * (time.monotonic() - began)
    # Half a second of steps of 0.1 s after step 7, then four times as long.
    assert asked == [[14, 29], [14, 29]]
    trace = json.loads(text)
    titles = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert titles == [
        "n0/0 (rank 0): pipeline 0, stage 0, layers 0-2",
        "n1/0 (rank 1): pipeline 0, stage 1, layers 3-7",
    ]
    for clock in trace["otherData"]["clocks"].values():
        assert clock["offset_us"] == pytest.approx(-3600e6, abs=1.001 * clock["within_us"])
        assert clock["within_us"] < took_us


def test_plan_that_changes_meanwhile_is_recorded_anew() -> None:
    job, there = running_job(), sessions(*NODES)

    async def lose_one(session: AgentSession) -> list[int]:
        """As `answer`, but its worker dies in the first recording."""
        asked = 0
        while not asked:
            for message in await session.outgoing():
                if message.WhichOneof("body") == "clock":
                    read = pb.ClockRead(number=message.clock.number, monotonic_ns=1)
                    timelines.clock_read(session.node, read)
                else:
                    asked = message.record.first_step
        job.state = "reconfiguring"
        await asyncio.sleep(10.0)
        job.state = "running"
        return [asked, *await answer(timelines, session, late=0)]

    timelines = Timelines(lambda: there)

    async def run() -> tuple[bytes, list[int], list[int]]:
        other = asyncio.create_task(answer(timelines, there[0], late=1))
        lost = asyncio.create_task(lose_one(there[1]))
        trace = await timelines.trace(job, steps=2)
        return trace, await other, await lost

    with contextlib.closing(VirtualLoop(limit_s=3600.0)) as loop:
        trace, other, lost = loop.run_until_complete(run())
    assert other == lost == [14, 29]
    assert json.loads(trace)["traceEvents"]


@pytest.mark.parametrize(
    ("nodes", "state", "said"),
    [
        (NODES[:1], "running", "node n1 is not connected"),
        (NODES, "queued", "job demo-1 is queued; a timeline is of one that is running"),
    ],
)
def test_what_cannot_be_recorded_is_refused(nodes: tuple[str, ...], state: str, said: str) -> None:
    job = running_job()
    job.state = state  # type: ignore[assignment]
    there = sessions(*nodes)
    with pytest.raises(NoTimeline, match=said):
        loops.run(Timelines(lambda: there).trace(job, steps=1))


def test_round_trip_bounds_the_offset() -> None:
    clock = round_trip(1_000, 50_000, 3_000)
    assert (clock.offset_ns, clock.error_ns) == (2_000 - 50_000, 1_000)
    for true_offset in (1_000 - 50_000, 3_000 - 50_000):
        assert abs(true_offset - clock.offset_ns) <= clock.error_ns


def test_a_recording_that_comes_in_parts_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As agents send a long one; what a lost connection has left of another one is dropped."""
    monkeypatch.setattr("oobleck.agent.connection.outbox._PART_CHARACTERS", 20)

    def told(found: Recording) -> list[pb.Recorded]:
        outbox = Outbox(Incarnation("a"))
        outbox.recorded(JobId("demo-1"), 0, found)
        return [message.recorded for message in outbox.take(0.0) if message.HasField("recorded")]

    async def in_parts(timelines: Timelines, session: AgentSession) -> None:
        while True:
            for message in await session.outgoing():
                if message.HasField("record"):
                    parts = told(recording(message.record, late=False))
                    assert len(parts) > 3
                    for part in (*parts[:2], *parts[:-2], *parts):
                        assert timelines.take_recording(session.node, part)
                    return
                read = pb.ClockRead(number=message.clock.number, monotonic_ns=0)
                timelines.clock_read(session.node, read)

    async def run() -> tuple[bytes, bool]:
        there = sessions(*NODES)
        timelines = Timelines(lambda: there)
        trace, *_ = await asyncio.gather(
            timelines.trace(running_job(), steps=2),
            *(in_parts(timelines, session) for session in there),
        )
        part = pb.Recorded(job_id="demo-1", recording="{", more=True)
        return trace, timelines.take_recording(there[0].node, part)

    text, wanted = loops.run(run())
    spans = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == len(NODES)
    assert not wanted, "nobody waits any more"

"""Several agents of a real master, and a job that they bring to its first plan."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

from oobleck.core.job.file import format_job
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support import loops
from support.fake_agent import DEADLINE_S, FakeAgent
from support.scenario import job_spec


def job_text(steps: int = 20) -> str:
    return format_job(job_spec("demo", steps=steps, shadows=0, evaluate=2))


async def all_of(agents: list[FakeAgent], condition: Callable[[FakeAgent], object]) -> None:
    await asyncio.gather(*(agent.until(lambda a=agent: condition(a)) for agent in agents))


@contextlib.asynccontextmanager
async def connected(address: str, count: int) -> AsyncIterator[list[FakeAgent]]:
    agents = [FakeAgent(f"n{number + 1}") for number in range(count)]
    try:
        for agent in agents:
            await agent.connect(address)
            assert agent.welcome is not None
        yield agents
    finally:
        for agent in agents:
            await agent.disconnect()


async def started(agents: list[FakeAgent], control: rpc.OperatorStub, job: str = "") -> str:
    """Submit a job and bring it to generation 1 on all agents."""
    reply = await control.Submit(pb.SubmitRequest(request_id="r1", job=job or job_text()))
    await all_of(agents, lambda a: a.assignments and a.assignments[-1].job_id == reply.job_id)
    for agent in agents:
        agent.workers()
    await all_of(agents, lambda a: a.planned == 1)
    for agent in agents:
        agent.workers(1)
    return reply.job_id


async def state_of(control: rpc.OperatorStub, job_id: str, wanted: str) -> pb.JobStatus:
    """The job's status once it is in the wanted state."""
    async with asyncio.timeout(DEADLINE_S):
        async for status in control.WatchJob(pb.JobRequest(job_id=job_id)):
            if status.state == wanted:
                return status
    raise AssertionError(f"{job_id} ended as {status.state}, never {wanted}")


def run(test: Coroutine[object, object, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(480):
            await test

    loops.run(bounded())

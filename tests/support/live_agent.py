"""Doubles of agents for a real master, over gRPC or in its process.

Whoever waits here waits for a condition, with a deadline, never for a time.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from oobleck.agent.connection.reports import newest_plan
from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.messages import PeerLost, StepRecord
from oobleck.master.clients.outbox import AgentSession
from oobleck.master.inbox import Incoming
from oobleck.master.loop import Master
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.assignments import read_assignment
from oobleck.proto.reports import records_message, report_bytes
from oobleck.proto.status import register_message, status_message
from oobleck.proto.types import (
    Assignment,
    Happening,
    NodeFacts,
)
from support.agent import Agent, facts
from support.jobs import job_text
from support.masters import DEADLINE_S


class LocalAgent(Agent):
    """An agent in the process of its master, which has opened a session for it."""

    def __init__(self, facts: NodeFacts, master: Master, session: AgentSession) -> None:
        super().__init__(facts)
        self._master, self.session = master, session

    @classmethod
    async def admitted(cls, master: Master, facts: NodeFacts) -> "LocalAgent":
        session = await master.sessions.open(Agent(facts).registration())
        assert isinstance(session, AgentSession), session
        return cls(facts, master, session)

    async def say(self, message: Incoming) -> None:
        await self._master.sessions.receive(self.session, message)

    async def tell(self) -> None:
        await self.say(self.status)


class FakeAgent(Agent):
    """An agent that speaks with a real master over gRPC."""

    def __init__(self, name: str, **changes: object) -> None:
        super().__init__(facts(name, **changes))
        self.name = name
        self.process = Incarnation(os.urandom(8).hex())
        self.assignments: list[Assignment] = []
        self.acks: dict[str, int] = {}
        self.acks_heard = 0
        self.refused: pb.Refused | None = None
        self.welcome: pb.Welcome | None = None
        self.ended: grpc.aio.AioRpcError | None = None
        self._news = asyncio.Condition()
        self._outgoing: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._channel: grpc.aio.Channel | None = None

    # ---- the session

    async def connect(self, address: str, *, reading: bool = True, beating: bool = True) -> None:
        """Register. Without `reading`, leave all that comes unread. Without `beating`, write only
        what the test sends: a call that the master ends during a write fails as INTERNAL in gRPC,
        without the master's reason."""
        self._channel = grpc.aio.insecure_channel(address)
        self._outgoing = asyncio.Queue()
        self.refused = self.ended = self.welcome = None
        call = rpc.ControlStub(self._channel).Session()
        self.send(register=register_message(self.registration()))
        self._tasks = [asyncio.create_task(self._write(call))]
        if reading:
            self._tasks.append(asyncio.create_task(self._read(call)))
            await self.until(lambda: self.welcome or self.refused or self.ended)
        if beating:
            self._tasks.append(asyncio.create_task(self._beat()))

    async def disconnect(self) -> None:
        """Close the stream as a killed agent does."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def send(self, **body: object) -> None:
        message = pb.AgentMessage(incarnation=self.facts.incarnation, **body)  # type: ignore[arg-type]
        self._outgoing.put_nowait(message)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outgoing.get())

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async for message in call:
                async with self._news:
                    self._take(message)
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            async with self._news:
                self.ended = error
                self._news.notify_all()

    def _take(self, message: pb.MasterMessage) -> None:
        match message.WhichOneof("body"):
            case "welcome":
                self.welcome = message.welcome
            case "refused":
                self.refused = message.refused
            case "assignment":
                self.assignments.append(read_assignment(message.assignment))
                self.running = newest_plan(self.running, self.assignments[-1])
            case "ack":
                self.acks[message.ack.job_id] = message.ack.through_step
                self.acks_heard += 1

    async def _beat(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(0.2)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(condition)

    # ---- messages

    def tell(self) -> None:
        self.send(status=status_message(self.status))

    def workers(self, generation: int = 0, *, finished: bool = False) -> None:
        """Tell that its worker is up and has entered the generation."""
        number = Generation(generation)
        self.change(job_id=self.assignments[-1].job_id, generation=number)
        self.worker(
            0,
            incarnation=self.process,
            pid=self.facts.pid + 1,
            card=f"127.0.0.1:{4000 + int(self.name[1:])}",
            generation=number,
            committed_step=0,
            finished=finished,
        )
        self.tell()

    def send_report(self, what: Happening) -> None:
        self.send(report=report_bytes(self.report(what)))

    def lost_peer(self, generation: int) -> None:
        self.send_report(PeerLost(generation=Generation(generation), step=1, detail="closed"))

    def records(self, job_id: str, *records: StepRecord) -> None:
        self.send(records=records_message(JobId(job_id), records))

    @property
    def planned(self) -> int:
        """Generation of the newest plan it was told; 0: none, or no plan for it."""
        return self.assignments[-1].generation if self.assignments else 0


# ---- several of them


def told(agents: Sequence[FakeAgent], job_id: str, *records: StepRecord) -> None:
    """Send the records from two nodes, which is what it takes for them to count."""
    for agent in agents[:2]:
        agent.records(job_id, *records)


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

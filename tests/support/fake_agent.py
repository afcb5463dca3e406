"""A small client that speaks the agent's side of the real protocol, and starts real masters.

It holds no workers: what it tells of them is what the test says. Waiting is for conditions, with
a deadline, never for a time.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import grpc

from bench.support.ports import choose_address
from oobleck.agent.connection.reports import newest_plan
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.messages import Evaluated, PeerLost, PhaseReached, StepRecord
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.assignments import read_assignment
from oobleck.proto.protocol import OLDEST
from oobleck.proto.reports import records_message, report_bytes
from oobleck.proto.status import register_message, status_message
from oobleck.proto.types import (
    Assignment,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerReport,
    WorkerStatus,
)
from support.forked import Forked

DEADLINE_S = 240.0

#: Nodes are told of at once. All else as it is by default: made-up agents live in the test's own
#: process, which a busy machine may keep from telling that they are alive.
QUICK = ("--heartbeat-s", "0.2", "--join-settle-s", "0.2")


class MasterProcess:
    """`oobleck-master` as a process of its own; `listen`: None for an address that the next one can
    have too."""

    def __init__(
        self,
        state_dir: Path,
        *options: str,
        listen: str | None = None,
        spans: Sequence[str] = QUICK,
    ) -> None:
        self.errors = state_dir.with_name(state_dir.name + ".stderr")
        where = ("--listen", listen or choose_address(), "--state-dir", str(state_dir))
        self.process = Forked("oobleck-master", *where, *spans, *options, errors=self.errors)
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            self.close()
            raise AssertionError(line + self.errors.read_text())
        self.address = line.split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def master(
    state_dir: Path,
    *options: str,
    listen: str | None = None,
    spans: Sequence[str] = QUICK,
) -> Iterator[MasterProcess]:
    running = MasterProcess(state_dir, *options, listen=listen, spans=spans)
    try:
        yield running
    finally:
        running.close()


@contextlib.asynccontextmanager
async def operator(address: str) -> AsyncIterator[rpc.OperatorStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.OperatorStub(channel)


def facts(name: str, **changes: object) -> NodeFacts:
    values: dict[str, object] = {
        "node": NodeName(name),
        "incarnation": Incarnation(os.urandom(8).hex()),
        "hostname": "testhost",
        "address": "127.0.0.1",
        "pid": 4242,
        "worker_slots": 1,
        "device": "cpu",
        "memory_per_worker_bytes": 1 << 30,
        **changes,
    }
    return NodeFacts(**values)  # type: ignore[arg-type]


def told(agents: Sequence["FakeAgent"], job_id: str, *records: StepRecord) -> None:
    """Two nodes tell of the steps, which is what it takes for them to count."""
    for agent in agents[:2]:
        agent.records(job_id, *records)


class FakeAgent:
    def __init__(self, name: str, **changes: object) -> None:
        self.facts = facts(name, **changes)
        self.name = name
        self.protocol = OLDEST
        self.status = NodeStatus()
        self.worker = Incarnation(os.urandom(8).hex())
        self.assignments: list[Assignment] = []
        self.running: Assignment | None = None
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
        """Register. With `reading` off, the agent leaves all that it is told unread; with `beating`
        off it writes only what it is asked to: of a call that the master ends during a write, gRPC
        tells INTERNAL in place of the master's reason."""
        self._channel = grpc.aio.insecure_channel(address)
        self._outgoing = asyncio.Queue()
        self.refused = self.ended = self.welcome = None
        call = rpc.ControlStub(self._channel).Session()
        registration = Registration(
            protocol=self.protocol, facts=self.facts, status=self.status, running=self.running
        )
        self.send(register=register_message(registration))
        self._tasks = [asyncio.create_task(self._write(call))]
        if reading:
            self._tasks.append(asyncio.create_task(self._read(call)))
            await self.until(lambda: self.welcome or self.refused or self.ended)
        if beating:
            self._tasks.append(asyncio.create_task(self._beat()))

    async def disconnect(self) -> None:
        """The stream closes as it does when the agent is killed."""
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

    # ---- what it says

    def tell(self) -> None:
        self.send(status=status_message(self.status))

    def workers(self, generation: int = 0, *, finished: bool = False) -> None:
        """Its worker is up and has entered the generation."""
        self.status = NodeStatus(
            job_id=self.assignments[-1].job_id,
            generation=Generation(generation),
            workers=(
                WorkerStatus(
                    slot=0,
                    incarnation=self.worker,
                    pid=self.facts.pid + 1,
                    card=f"127.0.0.1:{4000 + int(self.name[1:])}",
                    generation=Generation(generation),
                    committed_step=0,
                    finished=finished,
                ),
            ),
        )
        self.tell()

    def report(self, what: PhaseReached | PeerLost | Evaluated) -> None:
        job_id = self.status.job_id
        assert job_id is not None
        report = WorkerReport(job_id=job_id, slot=0, incarnation=self.worker, what=what)
        self.send(report=report_bytes(report))

    def lost_peer(self, generation: int) -> None:
        self.report(PeerLost(generation=Generation(generation), step=1, detail="closed"))

    def records(self, job_id: str, *records: StepRecord) -> None:
        self.send(records=records_message(JobId(job_id), records))

    @property
    def planned(self) -> int:
        """Generation of the newest plan it was told; 0: none, or no plan for it."""
        return self.assignments[-1].generation if self.assignments else 0

"""The master's end of an agent's session, driven by a test: it says what the test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from bench.support.ports import choose_address
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import Assign, Measure, Rendezvous
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold
from oobleck.host.detection import Detection
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message
from oobleck.proto.control_pb2_grpc import (
    ControlServicer,
    add_ControlServicer_to_server,
)
from oobleck.proto.detection import welcome_message
from oobleck.proto.protocol import NEWEST
from oobleck.proto.reports import read_report
from oobleck.proto.status import read_register, read_status
from oobleck.proto.types import Assignment, Happening, Head, WorkerReport
from support.waiting import PATIENCE_S

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs


def job(name: str, *, steps: int = 1000) -> JobSpec:
    """Return a job for the stand-in worker, which takes its pace from the seed, in ms a step."""
    return JobSpec(
        name=name,
        model=ModelSpec(layers=2, hidden=8, heads=2, sequence_length=8),
        data=DataSpec(text=("/dev/null",)),
        training=TrainingSpec(steps=steps, global_batch=4, seed=10),
    )


def plan(generation: int, *nodes: str, slots: int = 1) -> Plan:
    """Return a plan of a pipeline per node and a stage per slot, for a model of as many layers."""
    return Plan.of_pipelines(
        [
            Pipeline(
                nodes=(NodeName(node),),
                stages=tuple(
                    Hold(
                        first_layer=slot,
                        last_layer=slot,
                        workers=(WorkerId(NodeName(node), slot),),
                    )
                    for slot in range(slots)
                ),
                microbatches=1,
            )
            for node in nodes
        ],
        generation=Generation(generation),
    )


#: Heartbeats are not to be waited for.
QUICK = replace(Detection(), heartbeat_s=0.2)


class Stream:
    """Session of an agent, from its registration on."""

    def __init__(self, context: Any, first: pb.AgentMessage) -> None:
        self._context = context
        self.heard_first = first
        self.register = read_register(first.register, first.incarnation)
        self.incarnation = first.incarnation
        self.ended = asyncio.Event()
        #: All messages since the registration.
        self.heard: list[pb.AgentMessage] = []
        self._news = asyncio.Condition()

    async def welcome(self, detection: Detection = QUICK, head: Head | None = None) -> None:
        await self.say(welcome=welcome_message(detection, NEWEST, head))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        with suppress(grpc.aio.AbortError):
            await self._context.abort(code, details)

    async def say(self, **body: Any) -> None:
        await self._context.write(pb.MasterMessage(**body))

    async def assign(
        self,
        job_id: str = "",
        spec: JobSpec | None = None,
        *,
        version: int = 1,
        placement: Plan | None = None,
        incarnations: tuple[str, ...] = (),
        measure: Measure | None = None,
        head: Head | None = None,
    ) -> None:
        assign = None
        if placement is not None:
            meeting = Rendezvous(host="127.0.0.1:20000", prefix="p")
            assign = Assign(plan=placement, rendezvous=meeting, boundary=False)
        told = Assignment(
            version=version,
            job_id=JobId(job_id) if job_id else None,
            job=spec,
            assign=assign,
            worker_incarnations=tuple(map(Incarnation, incarnations)),
            measure=measure,
            head=head,
        )
        await self.say(assignment=assignment_message(told))

    async def note(self, message: pb.AgentMessage) -> None:
        async with self._news:
            self.heard.append(message)
            self._news.notify_all()

    async def until(self, what: Callable[[pb.AgentMessage], bool]) -> pb.AgentMessage:
        """Return the first message since the registration that `what` is true for."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                for message in self.heard:
                    if what(message):
                        return message
                await self._news.wait()

    async def workers(self, what: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, ...]:
        """Return the workers of the first status that `what` is true for."""
        message = await self.until(
            lambda m: m.HasField("status") and what(read_status(m.status).workers)
        )
        return read_status(message.status).workers

    async def ready(self, count: int = 1) -> tuple[Any, ...]:
        return await self.workers(lambda ws: len(ws) == count and all(w.pid and w.card for w in ws))

    def reports(self, kind: type[Happening]) -> list[WorkerReport]:
        found = [read_report(message.report) for message in self.heard if message.report]
        return [report for report in found if isinstance(report.what, kind)]

    def steps(self) -> list[int]:
        return [r.step for m in self.heard if m.HasField("records") for r in m.records.records]


class ScriptedMaster(ControlServicer):
    """Double of a master for a real agent: it answers nothing by itself."""

    def __init__(self) -> None:
        #: Sessions that no test has taken yet.
        self.waiting: asyncio.Queue[Stream] = asyncio.Queue()
        self._server: Any = None
        self.address = choose_address()

    async def Session(self, requests: Any, context: Any) -> None:
        first = await context.read()
        stream = Stream(context, first)
        await self.waiting.put(stream)
        try:
            while (message := await context.read()) is not EOF:
                await stream.note(message)
        finally:
            stream.ended.set()

    async def next_session(self) -> Stream:
        async with asyncio.timeout(PATIENCE_S):
            return await self.waiting.get()

    async def start(self) -> None:
        self._server = grpc.aio.server()
        add_ControlServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def restart(self) -> Stream:
        """Restart at the same address, welcome the agent that returns, and return its session."""
        again = await self.restart_unwelcome()
        await again.welcome()
        return again

    async def restart_unwelcome(self) -> Stream:
        """Restart at the same address; return the agent's session, whose registration waits."""
        await self.stop()
        await self.start()
        return await self.next_session()

    @staticmethod
    @asynccontextmanager
    async def running() -> AsyncIterator["ScriptedMaster"]:
        master = ScriptedMaster()
        await master.start()
        try:
            yield master
        finally:
            await master.stop()

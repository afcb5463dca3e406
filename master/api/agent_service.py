"""The agents' side of the service: one bidirectional stream is one session.

The agent's messages go into the loop's inbox, and the session's outbox goes into the stream. When
either side ends, the session is over; the loop decides the consequences.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from oobleck.core.ids import NodeName
from oobleck.core.orders import Answer, Unable
from oobleck.master.api.access import MOST_DETAILS, caller
from oobleck.master.api.wheels import Wheels
from oobleck.master.clients.outbox import AgentSession, refused_message
from oobleck.master.inbox import Incoming, Output, Records
from oobleck.master.loop import Master
from oobleck.master.rules.admission import Refusal
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.checks import check_slot
from oobleck.proto.detection import welcome_message
from oobleck.proto.examinations import read_answer
from oobleck.proto.protocol import OLDEST, common
from oobleck.proto.reports import read_output, read_records, read_report
from oobleck.proto.status import read_register, read_status
from oobleck.proto.types import NodeStatus, WorkerReport

log = logging.getLogger(__name__)

#: Seconds to finish writing a message when its stream ends; an agent that does not read loses it.
_WRITE_END_S = 2.0

Context = grpc.aio.ServicerContext[pb.AgentMessage, pb.MasterMessage]


class ControlService(rpc.ControlServicer):
    def __init__(self, master: Master) -> None:
        self._master = master
        self._wheels = Wheels(master.config.code)

    async def GetCode(
        self, request: pb.CodeRequest, context: Context
    ) -> AsyncIterator[pb.CodeChunk]:
        async for data in self._wheels.parts(request.sha256, context):
            yield pb.CodeChunk(data=data)

    async def GiveCode(
        self, requests: AsyncIterator[pb.CodeChunk], context: Context
    ) -> pb.CodeReply:
        wanted = self._master.adoptions.wanted
        if not wanted:
            text = "code: the master has not asked for a wheel"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        try:
            digest = await self._wheels.put((chunk.data async for chunk in requests), wanted)
        except ValueError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:MOST_DETAILS])
        return pb.CodeReply(sha256=digest)

    async def Session(self, requests: AsyncIterator[pb.AgentMessage], context: Context) -> None:
        timing, identity = self._master.config.timing, caller(context)
        if identity is not None:
            name, now = NodeName(identity.name), self._master.now()
            early = self._master.sessions.too_early(name, now)
            if early is not None:
                await context.write(refused_message(early))
                return
        try:
            # After that the agent has given up.
            async with asyncio.timeout(timing.answer_s):
                first = await anext(requests)
        except StopAsyncIteration:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "register: did not come")
        except TimeoutError:
            # Temporary: the message may be on its way, or this master was stopped.
            text = f"register: did not come within {timing.answer_s:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MOST_DETAILS])
        try:
            if not first.HasField("register"):
                raise ValueError("register: must be the first message of a session")
            registration = read_register(first.register, first.incarnation)
            node = registration.facts.node
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MOST_DETAILS])
        if identity is not None and identity.name != node:
            text = f"node: the certificate is of {identity.name}, which cannot speak for {node}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
        session = await self._master.sessions.open(registration, identity)
        if isinstance(session, Refusal):
            await context.write(refused_message(session))
            return
        spoken = common(registration.protocol, registration.facts.newest_protocol) or OLDEST
        welcome = welcome_message(
            timing, spoken, self._master.state.head, self._master.config.heads
        )
        try:
            await context.write(pb.MasterMessage(welcome=welcome))
            await self._serve(session, requests, context)
        finally:
            self._master.sessions.close(session)

    async def _serve(
        self, session: AgentSession, requests: AsyncIterator[pb.AgentMessage], context: Context
    ) -> None:
        """Serve the session until the agent or the master ends it."""
        reading = asyncio.create_task(self._read(session, requests))
        writing = asyncio.create_task(_write(session, context))
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, writing):
                task.cancel()
            ended = await asyncio.gather(reading, writing, return_exceptions=True)
        for result in ended:
            if isinstance(result, ValueError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(result)[:MOST_DETAILS])
            if isinstance(result, Exception) and not isinstance(result, grpc.RpcError):
                log.warning("session failed", extra={"node": session.node, "error": repr(result)})

    async def _read(self, session: AgentSession, requests: AsyncIterator[pb.AgentMessage]) -> None:
        slots = self._master.state.nodes[session.node].facts.worker_slots
        async for message in requests:
            if message.incarnation != session.incarnation:
                self._master.sessions.refused["message of another incarnation"] += 1
                continue
            match message.WhichOneof("body"):
                case "recorded":
                    check_slot(message.recorded.slot, slots)
                    if not self._master.timelines.take_recording(session.node, message.recorded):
                        await session.rest(message.ByteSize())
                    continue
                case "clock":
                    self._master.timelines.clock_read(session.node, message.clock)
                    continue
                case "examined":
                    answer = _answer(session, message.examined)
                    self._master.examinations.take(session.node, message.examined.number, answer)
                    continue
                case "job_told":
                    reply = message.job_told
                    self._master.adoptions.job_told(session.node, reply.number, reply.job)
                    await session.rest(message.ByteSize())
                    continue
                case _:
                    pass
            # The rest delays the next message, a heartbeat too: it is only for rates that no agent
            # needs.
            await session.rest(message.ByteSize())
            for incoming in self._known(session, message):
                _check_slots(incoming, slots)
                await self._master.sessions.receive(session, incoming)

    def _known(self, session: AgentSession, message: pb.AgentMessage) -> list[Incoming]:
        """Return the parts of the message that this master knows; an agent of a later release may
        send more. Raises ValueError where the message is malformed."""
        try:
            return _incoming(message)
        except ValueError:
            if not session.newer:
                raise
            self._master.sessions.refused["message of a newer protocol"] += 1
            return []


def _answer(session: AgentSession, message: pb.Examined) -> Answer:
    """Read the agent's answer. Raises ValueError where it is malformed; from an agent of a later
    release it is then Unable."""
    try:
        return read_answer(message)
    except ValueError as error:
        if not session.newer:
            raise
        return Unable(reason=f"its agent is of a later release: {error}")


async def _write_whole(context: Context, message: pb.MasterMessage) -> None:
    """Write the message to its end, even if cancelled meanwhile. During a write gRPC cannot send
    the status that ends the stream, so the agent would wait for ever."""
    writing = asyncio.ensure_future(context.write(message))
    # Fetch the outcome, which asyncio would otherwise log as never retrieved.
    writing.add_done_callback(lambda written: written.cancelled() or written.exception())
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait((writing,), timeout=_WRITE_END_S)
        raise


async def _write(session: AgentSession, context: Context) -> None:
    while True:
        for message in await session.outgoing():
            await _write_whole(context, message)
            if message.HasField("refused"):
                return


def _check_slots(incoming: Incoming, slots: int) -> None:
    """Check that the message names only workers of the agent's node. Raises ValueError."""
    match incoming:
        case NodeStatus(workers=workers):
            for worker in workers:
                check_slot(worker.slot, slots)
        case WorkerReport(slot=slot) | Output(slot=slot):
            check_slot(slot, slots)
        case Records():
            pass


def _incoming(message: pb.AgentMessage) -> list[Incoming]:
    """Read the message's content. Raises ValueError where it is malformed."""
    match message.WhichOneof("body"):
        case "status":
            return [read_status(message.status)]
        case "report":
            return [read_report(message.report)]
        case "records":
            job_id, records, restored_in = read_records(message.records)
            return [Records(job_id=job_id, records=records, restored_in=restored_in)]
        case "log":
            job_id, slot, lines = read_output(message.log)
            return [Output(job_id=job_id, slot=slot, lines=lines)]
        case "register":
            raise ValueError("register: came twice in one session")
        case _:
            raise ValueError("body: is missing")

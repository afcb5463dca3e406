"""The agent's conversation with the master: one stream at a time, and a new one when it ends.

Owns the channel, the registration, heartbeats and reconnects. Training goes on while there is no
session; what the master must learn waits in the outbox. Must not know processes.
"""

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from oobleck.agent.address import local_address
from oobleck.agent.config import AgentConfig
from oobleck.agent.desired import Desired, PlanPart
from oobleck.agent.outbox import Outbox
from oobleck.host.detection import Detection
from oobleck.host.endpoint import Endpoint
from oobleck.host.messages import Record
from oobleck.host.surroundings import Surroundings
from oobleck.planner.ids import Incarnation, JobId
from oobleck.planner.job import JobSpec
from oobleck.planner.jobfile import parse_job
from oobleck.proto import control_pb2 as pb
from oobleck.proto import convert
from oobleck.proto.control_pb2_grpc import ControlStub
from oobleck.proto.detection import keepalive_options, read_welcome
from oobleck.proto.secure import open_aio_channel
from oobleck.proto.types import PROTOCOL, Assignment, NodeFacts, Registration, WorkerReport

logger = logging.getLogger(__name__)

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs

#: Longest first wait before a new session, a random part of which is waited.
FIRST_RETRY_S = 0.1

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
)

#: Answers to a registration that another try does not change.
_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


def next_retry_s(retry_s: float, detection: Detection) -> float:
    """The longest wait after one of at most `retry_s`; a random part of it is waited, so that all
    agents of a master that comes back do not come at the same moment."""
    return min(detection.longest_retry_s, 2 * retry_s)


class _SessionEnded(Exception):
    """The stream is over; the text says why."""


class _Refused(Exception):
    def __init__(self, reason: str, *, temporary: bool) -> None:
        super().__init__(reason)
        self.temporary = temporary


class _OtherTimeOuts(Exception):
    """The channel was opened with time-outs that are not the master's."""


class Session:
    def __init__(
        self,
        config: AgentConfig,
        incarnation: Incarnation,
        outbox: Outbox,
        surroundings: Surroundings,
        *,
        endpoint: Callable[[], Endpoint],
        on_address: Callable[[str], None],
        on_detection: Callable[[Detection], None],
        on_assigned: Callable[[Desired | None, bool], None],
        on_record: Callable[[JobId, Record], None],
        standing_reports: Callable[[], list[WorkerReport]],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._outbox = outbox
        self._surroundings = surroundings
        self._now = surroundings.now
        self._endpoint = endpoint
        self._on_address = on_address
        self._on_detection = on_detection
        self._on_assigned = on_assigned
        self._on_record = on_record
        self._standing_reports = standing_reports
        self._address = config.address
        self._closing = False
        self._last_trouble = ""
        #: As the master told; until then those that most masters have.
        self._detection = Detection()
        self._retry_s = FIRST_RETRY_S
        #: The newest assignment with a plan of the job that is here; see `Registration`.
        self._running: Assignment | None = None

    async def run(self) -> str | None:
        """Until the master refuses for good (the reason) or `close` was called (None)."""
        while not self._closing:
            endpoint = self._endpoint()
            options = (*CHANNEL_OPTIONS, *keepalive_options(self._detection))
            async with open_aio_channel(endpoint, options) as channel:
                stub = ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
                if (refusal := await self.converse(stub)) is not None:
                    return refusal
        return None

    async def converse(self, stub: ControlStub) -> str | None:
        """`run` over a channel that is there, which may be until its time-outs must change or there
        is a newer certificate."""
        endpoint, keepalive = self._endpoint(), keepalive_options(self._detection)
        while (
            not self._closing
            and keepalive == keepalive_options(self._detection)
            and endpoint == self._endpoint()
        ):
            try:
                await self._one(stub)
            except _Refused as refusal:
                if not refusal.temporary:
                    return str(refusal)
                self._trouble(f"refused for now: {refusal}")
            except _SessionEnded as end:
                self._trouble(str(end))
            except _OtherTimeOuts:
                return None
            if not self._closing:
                await asyncio.sleep(self._surroundings.uniform(0.0, self._retry_s))
                self._retry_s = next_retry_s(self._retry_s, self._detection)
        return None

    def close(self) -> None:
        """Send what waits, then end."""
        self._closing = True
        self._outbox.wake.set()

    def _trouble(self, reason: str) -> None:
        if reason != self._last_trouble:
            self._last_trouble = reason
            logger.warning(
                "no session, trying on", extra={"master": self._config.master, "reason": reason}
            )

    async def _one(self, stub: ControlStub) -> None:
        """One session, from the registration to the end of its stream."""
        call = stub.Session()
        try:
            await self._talk(call)
        except grpc.aio.AioRpcError as error:
            raise _SessionEnded(_explain(error.code(), error.details())) from error
        except (TimeoutError, asyncio.InvalidStateError, OSError) as error:
            raise _SessionEnded(str(error) or "no answer in time") from error
        finally:
            call.cancel()

    async def _talk(self, call: Any) -> None:
        first = await self._register(call)
        match first.WhichOneof("body"):
            case "welcome":
                self._welcomed(first.welcome)
            case "refused":
                raise _Refused(first.refused.reason, temporary=first.refused.temporary)
            case other:
                raise _SessionEnded(f"the master began with {other} instead of a welcome")
        logger.info("session began", extra={"master": self._config.master})
        self._last_trouble, self._retry_s = "", FIRST_RETRY_S
        self._outbox.session_began(self._standing_reports(), self._now())
        halves = (
            asyncio.create_task(self._receive_all(call)),
            asyncio.create_task(self._send_all(call, self._detection.heartbeat_s)),
        )
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for half in halves:
                half.cancel()
            results = await asyncio.gather(*halves, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _welcomed(self, welcome: pb.Welcome) -> None:
        try:
            detection = read_welcome(welcome)
        except ValueError as error:
            raise _SessionEnded(f"the master's time-outs make no sense: {error}") from error
        self._on_detection(detection)
        before, self._detection = self._detection, detection
        if keepalive_options(before) != keepalive_options(detection):
            raise _OtherTimeOuts

    async def _register(self, call: Any) -> pb.MasterMessage:
        """The master's answer. What it cannot accept now it never will: that is a refusal."""
        try:
            await self._send(call, self._registration())
            async with asyncio.timeout(self._detection.answer_s):
                first: pb.MasterMessage = await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            first = _EOF
        if first is not _EOF:
            return first
        async with asyncio.timeout(self._detection.answer_s):
            if await call.code() in _FINAL:
                raise _Refused(await call.details(), temporary=False)
        raise await _ended(call, self._detection.answer_s)

    def _registration(self) -> pb.AgentMessage:
        address = self._address
        if address is None:
            address = self._address = local_address(self._config.master)
        self._on_address(address)
        facts = NodeFacts(
            node=self._config.name,
            incarnation=self._incarnation,
            hostname=self._config.hostname,
            address=address,
            pid=os.getpid(),
            worker_slots=self._config.worker_slots,
            device=self._config.device,
            memory_per_worker_bytes=self._config.memory_per_worker_bytes,
            device_kind=self._config.device_kind,
        )
        registration = Registration(
            protocol=PROTOCOL,
            facts=facts,
            status=self._outbox.current_status,
            running=self._running,
        )
        return pb.AgentMessage(
            incarnation=self._incarnation, register=convert.register_message(registration)
        )

    async def _send(self, call: Any, message: pb.AgentMessage) -> None:
        async with asyncio.timeout(self._detection.answer_s):
            await call.write(message)

    async def _send_all(self, call: Any, heartbeat_s: float) -> None:
        heartbeat_at = self._now() + heartbeat_s
        while True:
            self._outbox.wake.clear()
            now = self._now()
            if now >= heartbeat_at:
                self._outbox.want_status()
            messages = self._outbox.take(now)
            for message in messages:
                if message.WhichOneof("body") == "status":
                    heartbeat_at = now + heartbeat_s
                await self._send(call, message)
            if messages:
                continue
            if self._closing:
                await call.done_writing()
                return
            due = self._outbox.next_due(now)
            wait_s = (heartbeat_at if due is None else min(due, heartbeat_at)) - self._now()
            if wait_s > 0:
                await _wait(self._outbox.wake, wait_s)

    async def _receive_all(self, call: Any) -> None:
        while (message := await call.read()) is not _EOF:
            match message.WhichOneof("body"):
                case "assignment":
                    self._assigned(message.assignment)
                case "ack":
                    ack = message.ack
                    self._outbox.acknowledge(JobId(ack.job_id), ack.through_step)
                case "record":
                    wish = message.record
                    self._on_record(
                        JobId(wish.job_id),
                        Record(
                            number=wish.number,
                            first_step=wish.first_step,
                            last_step=wish.last_step,
                        ),
                    )
                case "clock":
                    self._outbox.clock(message.clock.number)
                case "refused":
                    raise _Refused(message.refused.reason, temporary=message.refused.temporary)
                case _:
                    pass  # a later protocol's addition; this one's are all above
        raise await _ended(call, self._detection.answer_s)

    def _assigned(self, assignment: pb.Assignment) -> None:
        """Streams keep the order and sessions follow each other: the last word is the newest."""
        try:
            read = convert.read_assignment(assignment)
            desired = _desired(read)
        except ValueError as error:
            logger.error("assignment not understood", extra={"reason": error})
            return
        self._running = newest_plan(self._running, read)
        self._on_assigned(desired, read.drained)


def newest_plan(known: Assignment | None, told: Assignment) -> Assignment | None:
    """What this agent says that it runs, after the master has `told` it something: a master whose
    journal lost its end may tell of an older plan than the workers have."""
    if told.job_id is None:
        return None
    if known is not None and known.job_id != told.job_id:
        known = None
    if told.plan is None:
        return known
    before = known.plan.generation if known is not None and known.plan is not None else 0
    if told.plan.generation < before:
        return known
    return msgspec.structs.replace(told, job="")


def _desired(assignment: Assignment) -> Desired | None:
    if assignment.job_id is None:
        return None
    part = None
    if assignment.plan is not None and assignment.rendezvous is not None:
        part = PlanPart(
            plan=assignment.plan,
            rendezvous=assignment.rendezvous,
            boundary=assignment.boundary,
            worker_incarnations=assignment.worker_incarnations,
            restore=assignment.restore,
            leaving=assignment.leaving,
            handover=assignment.handover,
            data=assignment.data,
        )
    return Desired(
        job_id=assignment.job_id,
        job=_job(assignment.job),
        part=part,
        measure=assignment.measure,
        save=assignment.save,
    )


@functools.lru_cache(maxsize=4)
def _job(text: str) -> JobSpec:
    """Every assignment repeats the job's text; reading it takes milliseconds of a recovery."""
    return parse_job(text)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


async def _ended(call: Any, answer_s: float) -> _SessionEnded:
    async with asyncio.timeout(answer_s):
        code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        return _SessionEnded("the master ended the session")
    return _SessionEnded(_explain(code, details))


def _explain(code: grpc.StatusCode, details: str | None) -> str:
    """Without gRPC's list of everything that it tried on the way."""
    return f"{code.name}: {(details or '').rpartition('last error: ')[2]}"

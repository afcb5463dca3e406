"""Conversation of the agent with the master: one stream at a time, and a new one when it ends.

Owns the channel, the registration, heartbeats and reconnects. Training continues while there is no
session; messages to the master wait in the outbox. Must not know processes.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from oobleck.agent.config import AgentConfig
from oobleck.agent.connection.heads import Heads, local_address
from oobleck.agent.connection.outbox import Outbox
from oobleck.agent.connection.reports import newest_plan
from oobleck.agent.connection.stream import Refused, SessionEnded, Stream, opened, refused
from oobleck.core.ids import Incarnation, JobId
from oobleck.core.messages import Record
from oobleck.host.address import split_addresses
from oobleck.host.detection import Detection
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.validity import refusal
from oobleck.host.system.environment import Environment
from oobleck.host.timeline import boot_id
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import fitted, read_assignment
from oobleck.proto.control_pb2_grpc import ControlStub
from oobleck.proto.detection import keepalive_options, read_addresses, read_welcome
from oobleck.proto.protocol import NEWEST, OLDEST
from oobleck.proto.secure import open_aio_channel
from oobleck.proto.status import register_message
from oobleck.proto.types import Assignment, Head, NodeFacts, Registration, WorkerReport

logger = logging.getLogger(__name__)

#: Longest first wait before a new session, a random part of which is waited.
FIRST_RETRY_S = 0.1
#: Most sessions on a channel. gRPC for ever counts a session that the master ends during our write
#: as an open stream, and a master limits the streams of a connection.
SESSIONS_PER_CHANNEL = 32

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
)


def channel_options(detection: Detection) -> tuple[tuple[str, int], ...]:
    """Return the channel's options. Connecting may take as long as an answer: handshakes of a
    thousand agents that return at once take a master seconds."""
    attempt = ("grpc.min_reconnect_backoff_ms", int(1000 * detection.answer_s))
    return (*_CHANNEL_OPTIONS, attempt, *keepalive_options(detection))


def next_retry_s(retry_s: float, detection: Detection) -> float:
    """Return the longest wait after one of at most `retry_s`; agents wait a random part of it."""
    return min(detection.longest_retry_s, 2 * retry_s)


class _OtherTimeOuts(Exception):
    """Notice that the master's time-outs differ from those that the channel was opened with."""


class Node(Protocol):
    """Node that the session serves: it acts on the master's messages and knows what to report."""

    @property
    def has_workers(self) -> bool: ...
    def reached_from(self, address: str) -> None: ...
    def session_open(self, is_open: bool) -> None: ...
    def detect(self, detection: Detection) -> None: ...
    def assigned(self, desired: Assignment) -> None: ...
    def not_understood(self, reason: str) -> None: ...
    def record(self, job_id: JobId, wish: Record) -> None: ...
    def return_code(self, digest: str) -> None: ...
    def acknowledged(self, job_id: JobId, step: int, evaluation: int) -> None: ...
    def standing_reports(self) -> list[WorkerReport]: ...


class Examiner(Protocol):
    """Examiner of the host, on the master's behalf."""

    def reached_from(self, address: str) -> None: ...
    def take(self, message: pb.Examine) -> None: ...


class Session:
    """Agent's side of its sessions with masters, one after the other."""

    def __init__(
        self,
        config: AgentConfig,
        incarnation: Incarnation,
        outbox: Outbox,
        environment: Environment,
        *,
        endpoint: Callable[[], Endpoint],
        heads: Heads | None = None,
        node: Node,
        examiner: Examiner | None = None,
    ) -> None:
        """Prepare, without a session yet. `endpoint`: returns the master's, with the newest
        certificate. `heads`: chooses its address; None: there is one master. `examiner`: None: this
        host is not examined."""
        self._config = config
        self._incarnation = incarnation
        self._outbox = outbox
        self._environment = environment
        self._now = environment.now
        self._endpoint = endpoint
        self._heads = heads
        #: The last try ended before the master's welcome.
        self._failed = False
        self._node = node
        self._examiner = examiner
        #: This host's address; None: not known until there is a way to the master.
        self._address = config.address
        #: `close` was called.
        self._closing = False
        #: Reason of the last failure, so that it is logged once; empty: it did not fail.
        self._last_trouble = ""
        #: The master's time-outs; until it sends them, those that most masters have.
        self._detection = Detection()
        #: Protocol of the present session.
        self._protocol = OLDEST
        #: Longest wait before the next try.
        self._retry_s = FIRST_RETRY_S
        #: The newest assignment with a plan of the job that is here; see `Registration`.
        self._running: Assignment | None = None
        #: The head whose assignment was acted on last; None: none was.
        self._acted_on: Head | None = None
        #: Id and text of the last assignment's job.
        self._job_text = "", ""
        #: Outranked heads that were passed over and logged.
        self._passed_over: set[tuple[str, int, str]] = set()
        #: `_running` as received, including fields of later releases.
        self._running_message = pb.Assignment()

    async def run(self) -> str | None:
        """Hold sessions until `close` is called, or the master refuses for good: return the
        reason."""
        while not self._is_over():
            endpoint = self._endpoint()
            options = channel_options(self._detection)
            async with open_aio_channel(endpoint, options) as channel:
                stub = ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
                if (refusal := await self.converse(stub)) is not None:
                    return refusal
        return None

    async def converse(self, stub: ControlStub) -> str | None:
        """Hold sessions as `run` does, over an open channel. It ends when the time-outs must
        change, there is a newer certificate, or the channel has had its share of sessions."""
        endpoint, keepalive = self._endpoint(), keepalive_options(self._detection)
        left = SESSIONS_PER_CHANNEL
        while (
            not self._is_over()
            and (left := left - 1) >= 0
            and keepalive == keepalive_options(self._detection)
            and endpoint == self._endpoint()
        ):
            try:
                await self._seek()
                if endpoint != self._endpoint():
                    return None
                await self._hold_session(stub)
            except Refused as refusal:
                if refusal.denied or not (refusal.temporary or self._node.has_workers):
                    return str(refusal)
                # Keep training: this master may be the wrong one, or speak another protocol.
                self._trouble(f"refused for now: {refusal}")
            except SessionEnded as end:
                self._trouble(self._refusal(str(end)) or str(end))
            except _OtherTimeOuts:
                return None
            if not self._is_over():
                await asyncio.sleep(self._environment.uniform(0.0, self._retry_s))
                self._retry_s = next_retry_s(self._retry_s, self._detection)
        return None

    def close(self) -> None:
        """Send the waiting messages, then end."""
        self._closing = True
        self._outbox.hurry(self._now())
        self._outbox.wake.set()

    def _is_over(self) -> bool:
        """Return whether no further session may begin, since the agent ends."""
        return self._closing or self._outbox.current_status.ending

    def _trouble(self, reason: str) -> None:
        if reason != self._last_trouble and not self._is_over():
            self._last_trouble = reason
            logger.warning(
                "no session, retrying", extra={"master": self._config.master, "reason": reason}
            )

    def _refusal(self, reason: str) -> str:
        """Return why master and agent do not accept each other's certificates; empty: unknown."""
        credentials = self._endpoint().credentials
        return refusal(credentials, reason, self._environment.unix()) if credentials else ""

    async def _seek(self) -> None:
        """Choose the head of the next session. Raises SessionEnded where none answers."""
        if self._heads is None:
            return
        failed, self._failed = self._failed, False
        if not await self._heads.seek(pass_over=failed):
            raise SessionEnded(f"nothing answers at any of {self._heads}")

    async def _hold_session(self, stub: ControlStub) -> None:
        """Hold a session, from the registration to the end of its stream."""
        self._failed = True
        with opened(stub.Session(), self._detection.answer_s) as stream:
            await self._talk(stream)

    async def _talk(self, stream: Stream) -> None:
        first = await stream.register(self._registration())
        match first.WhichOneof("body"):
            case "welcome":
                self._adopt(first.welcome)
            case "refused":
                raise refused(first.refused)
            case other:
                raise SessionEnded(f"the master began with {other} instead of a welcome")
        stream.answer_s = self._detection.answer_s
        self._failed = False
        fields = {"master": self._endpoint().address, "protocol": self._protocol}
        logger.info("session began", extra=fields)
        self._last_trouble, self._retry_s = "", FIRST_RETRY_S
        self._outbox.session_began(self._node.standing_reports(), self._now())
        self._node.session_open(True)
        receiving, sending = tasks = (
            asyncio.create_task(self._receive_all(stream)),
            asyncio.create_task(self._send_all(stream, self._detection.heartbeat_s)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and sending.exception() is None:
                # The master ends the stream once it has the last messages. To cancel the call
                # before would drop those still in transit.
                await asyncio.wait({receiving}, timeout=self._detection.answer_s)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._node.session_open(False)
            self._outbox.session_ended()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _adopt(self, welcome: pb.Welcome) -> None:
        try:
            detection, self._protocol, head = read_welcome(welcome)
            addresses = read_addresses(welcome)
        except ValueError as error:
            raise SessionEnded(f"the master's welcome makes no sense: {error}") from error
        if self._is_outranked(head):
            raise SessionEnded(f"it is in {head}, and this node follows {self._acted_on}")
        if self._heads is not None:
            self._heads.learn(addresses)
        self._node.detect(detection)
        before, self._detection = self._detection, detection
        if keepalive_options(before) != keepalive_options(detection):
            raise _OtherTimeOuts

    def _registration(self) -> pb.AgentMessage:
        address = self._address
        if address is None:
            address = self._address = local_address(split_addresses(self._config.master))
        self._node.reached_from(address)
        if self._examiner is not None:
            self._examiner.reached_from(address)
        facts = NodeFacts(
            node=self._config.name,
            incarnation=self._incarnation,
            hostname=self._config.hostname,
            address=address,
            pid=self._environment.pid(),
            worker_slots=self._config.worker_slots,
            device=self._config.device,
            memory_per_worker_bytes=self._config.memory_per_worker_bytes,
            device_kind=self._config.device_kind,
            versions=self._config.versions,
            newest_protocol=NEWEST,
            boot=boot_id(),
            code=self._config.code,
            rack=self._config.rack,
        )
        registration = Registration(
            protocol=OLDEST,
            facts=facts,
            status=self._outbox.take_status(),
            running=self._running,
            acted_on=self._acted_on,
        )
        register = register_message(registration)
        if self._running is not None:
            register.running.CopyFrom(fitted(self._running_message))
        return pb.AgentMessage(incarnation=self._incarnation, register=register)

    async def _send_all(self, stream: Stream, heartbeat_s: float) -> None:
        heartbeat_at = self._now() + heartbeat_s
        while True:
            self._outbox.wake.clear()
            now = self._now()
            if now >= heartbeat_at:
                self._outbox.want_status(now)
            messages = self._outbox.take(now)
            for message in messages:
                if message.WhichOneof("body") == "status":
                    heartbeat_at = now + heartbeat_s
                await stream.send(message)
            if messages:
                continue
            if self._closing:
                await stream.close()
                return
            due = self._outbox.next_due(now)
            wait_s = (heartbeat_at if due is None else min(due, heartbeat_at)) - self._now()
            if wait_s > 0:
                await _wait(self._outbox.wake, wait_s)

    async def _receive_all(self, stream: Stream) -> None:
        while True:
            message = await stream.receive()
            match message.WhichOneof("body"):
                case "assignment":
                    self._assigned(message.assignment)
                case "ack":
                    ack = message.ack
                    job_id, step = JobId(ack.job_id), ack.through_step
                    self._outbox.acknowledge(job_id, step)
                    self._node.acknowledged(job_id, step, ack.evaluated_step)
                case "record":
                    wish = message.record
                    self._node.record(
                        JobId(wish.job_id),
                        Record(
                            number=wish.number,
                            first_step=wish.first_step,
                            last_step=wish.last_step,
                        ),
                    )
                case "clock":
                    self._outbox.clock(message.clock.number)
                case "examine":
                    if self._examiner is not None:
                        self._examiner.take(message.examine)
                case "refused":
                    raise refused(message.refused)
                case "tell_job":
                    self._send_job(message.tell_job)
                case "return_code":
                    self._node.return_code(message.return_code.sha256)
                case _:
                    pass  # a message of a later protocol

    def _is_outranked(self, head: Head | None) -> bool:
        """Return whether another head has taken this one's place; log that once."""
        if head is None or self._acted_on is None or not self._acted_on.outranks(head):
            return False
        name = head.history, head.term, head.begun_by
        if name not in self._passed_over:
            self._passed_over.add(name)
            logger.warning(
                "this master is not followed: another one went on in its place",
                extra={"master": self._config.master, "its": head, "followed": self._acted_on},
            )
        return True

    def _send_job(self, question: pb.TellJob) -> None:
        job_id, text = self._job_text
        self._outbox.send_job(question.number, text if job_id == question.job_id else "")

    def _assigned(self, assignment: pb.Assignment) -> None:
        """Apply an assignment, the newest so far, since a stream keeps the order."""
        try:
            desired = read_assignment(assignment)
        except ValueError as error:
            fix = "if the master is of a later release, upgrade Oobleck here"
            self._node.not_understood(f"{error}; {fix}")
            return
        if self._is_outranked(desired.head):
            return
        self._acted_on = desired.head or self._acted_on
        self._job_text = assignment.job_id, assignment.job
        before, self._running = self._running, newest_plan(self._running, desired)
        if self._running is not before and self._running is not None:
            self._running_message.CopyFrom(assignment)
            self._running_message.ClearField("job")
        self._node.assigned(desired)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return

"""Outbox of one agent's session: messages to send, and when records are acknowledged.

An outbox holds at most one message of each kind, besides operators' questions. A newer assignment
replaces an older one, a higher acknowledgement a lower one. So the queue of a slow agent stays
bounded, and no other task waits for it. A `Budget` bounds one sender's rate.
"""

import asyncio
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from oobleck.core.ids import Incarnation, JobId, NodeName
from oobleck.master.rules.admission import Refusal
from oobleck.proto import control_pb2 as pb
from oobleck.proto.assignments import assignment_message
from oobleck.proto.types import Assignment

T = TypeVar("T")
#: Unhandled messages of one agent, from which on its stream is not read.
_MOST_UNREAD = 256
#: Messages of one agent read per second, and in a burst; each 4 KiB of a large one counts.
MESSAGES_PER_S, MESSAGES_AT_ONCE = 500.0, 4096
_COUNTED_BYTES = 4096
#: Shortest interval of acknowledgements to agents that send records.
SENDERS_S = 0.5
#: The same for all other agents, which keep the same records. Well below the time for which they
#: hold their copies back (4 s), so that these are not sent in vain.
OTHERS_S = 2.0
#: Number of other agents that are acknowledged at a time, and seconds between such batches.
_BATCH = 50
_BATCH_INTERVAL_S = 0.05


@dataclass(slots=True)
class Budget:
    """Token bucket: `burst` at once, and `per_s` more each second."""

    per_s: float
    burst: float
    _available: float = 0.0
    _at: float | None = None

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` if it is available; return whether it was."""
        self._fill(now)
        if self._available < amount:
            return False
        self._available -= amount
        return True

    def owe(self, amount: float, now: float) -> float:
        """Take `amount`, a debt of one burst at most, and return the seconds until it is paid."""
        self._fill(now)
        self._available = max(-self.burst, self._available - amount)
        return max(0.0, -self._available / self.per_s)

    def _fill(self, now: float) -> None:
        if self._at is None:
            self._available = self.burst
        else:
            self._available = min(self.burst, self._available + (now - self._at) * self.per_s)
        self._at = now


@dataclass(slots=True, eq=False, kw_only=True)
class AgentSession:
    number: int
    node: NodeName
    incarnation: Incarnation
    #: The agent speaks a protocol that this master does not know.
    newer: bool = False
    #: Taken for each message handed to the loop, released when the loop has handled it.
    credit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MOST_UNREAD))
    #: Limit on reading the agent's messages, over all its sessions: faster ones wait in its own
    #: connection.
    pace: Budget
    #: Version of the newest assignment in the outbox.
    sent_version: int = -1
    #: True if the node was held for another job when `brief` last ran, so that its reports were
    #: ignored.
    held: bool = False
    _assignment: Assignment | None = None
    _acks: dict[JobId, tuple[int, int]] = field(default_factory=dict)
    #: Operators' questions; the answers go to the asking task, not to the loop.
    _questions: list[pb.MasterMessage] = field(default_factory=list)
    _refusal: Refusal | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def rest(self, size: int) -> None:
        """Return when the pace allows a message of `size` bytes."""
        count = 1 + size // _COUNTED_BYTES
        await asyncio.sleep(self.pace.owe(count, asyncio.get_running_loop().time()))

    def assign(self, assignment: Assignment) -> None:
        self.sent_version = assignment.version
        self._assignment = assignment
        self._changed.set()

    def acknowledge(self, job_id: JobId, through_step: int, evaluated_step: int) -> None:
        """Send how far step records and evaluations are on disk."""
        self._acks[job_id] = through_step, evaluated_step
        self._changed.set()

    def ask(self, question: pb.MasterMessage) -> None:
        """Send the question at the next opportunity; it may never be answered."""
        self._questions.append(question)
        self._changed.set()

    def end(self, refusal: Refusal) -> None:
        """Send this refusal as the last message, and close the session."""
        self._refusal = refusal
        self._changed.set()

    async def outgoing(self) -> list[pb.MasterMessage]:
        """Wait for messages to send, and return them; a message with `refused` is the last."""
        await self._changed.wait()
        self._changed.clear()
        messages = []
        if self._assignment is not None:
            assignment = assignment_message(self._assignment)
            messages.append(pb.MasterMessage(assignment=assignment))
            self._assignment = None
        for job_id, (step, evaluated) in self._acks.items():
            ack = pb.Ack(job_id=job_id, through_step=step, evaluated_step=evaluated)
            messages.append(pb.MasterMessage(ack=ack))
        self._acks.clear()
        messages += self._questions
        self._questions.clear()
        if self._refusal is not None:
            messages.append(refused_message(self._refusal))
        return messages


class Questions(Generic[T]):
    """Questions to agents whose answers are awaited, by node and number."""

    def __init__(self) -> None:
        #: Starts at random, so that no answer to an earlier master is taken for one to this.
        self._numbers = itertools.count(1 + secrets.randbits(32))
        self._open: dict[tuple[NodeName, int], asyncio.Future[T]] = {}

    def send(self, session: AgentSession, message: Callable[[int], pb.MasterMessage]) -> int:
        """Send the message for a new number, and return that; no answer is awaited."""
        number = next(self._numbers)
        session.ask(message(number))
        return number

    def ask(
        self, session: AgentSession, message: Callable[[int], pb.MasterMessage]
    ) -> asyncio.Future[T]:
        """Send the message for a new number; return the answer to come, to cancel or await."""
        key = session.node, self.send(session, message)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._open[key] = answer
        answer.add_done_callback(lambda _: self._open.pop(key, None))
        return answer

    def answered(self, node: NodeName, number: int, value: T) -> None:
        """Pass an agent's answer to the task that awaits it, if there is one."""
        answer = self._open.get((node, number))
        if answer is not None and not answer.done():
            answer.set_result(value)


class Rounds:
    """Rounds of acknowledgements: batches of sessions, for the jobs that got new records. Writing
    to a thousand sessions at once would keep all other tasks waiting."""

    def __init__(self, at_most_every_s: float) -> None:
        self._at_most_every_s = at_most_every_s
        #: Jobs that got records since the round began, and the earliest time of the next round.
        self._noted: set[JobId] = set()
        self._next_round_at = 0.0
        #: Jobs of this round, session ids still to send to, and the time of the next batch.
        self._jobs: list[JobId] = []
        self._left: deque[int] = deque()
        self._free_at = 0.0

    def note(self, job_id: JobId) -> None:
        self._noted.add(job_id)

    @property
    def due_at(self) -> float | None:
        """Time at which `take` returns something; None: nothing to send."""
        if self._left:
            return self._free_at
        return self._next_round_at if self._noted else None

    def take(self, now: float, sessions: Iterable[int]) -> tuple[list[JobId], list[int]]:
        """Return the jobs to acknowledge now, and the sessions of the next batch."""
        if (due_at := self.due_at) is None or now < due_at:
            return [], []
        if not self._left:
            self._jobs = sorted(self._noted)
            self._noted.clear()
            self._next_round_at = now + self._at_most_every_s
            self._left.extend(sessions)
        batch = [self._left.popleft() for _ in range(min(len(self._left), _BATCH))]
        self._free_at = now + _BATCH_INTERVAL_S
        return self._jobs, batch


def refused_message(refusal: Refusal) -> pb.MasterMessage:
    refused = pb.Refused(
        reason=refusal.reason, temporary=refusal.temporary, revoked=refusal.revoked
    )
    return pb.MasterMessage(refused=refused)

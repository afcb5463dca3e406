"""The agents' sessions: who is admitted, where their messages go, and what each is told.

Handlers run in an iteration of the loop, in the order of arrival. Only the loop calls `brief` and
`acknowledge`, once everything that they tell is on disk. Must not know gRPC.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from oobleck.host.ipc.messages import Evaluated
from oobleck.master.clients.incoming import Incoming, Output, Records
from oobleck.master.clients.outbox import OTHERS_S, SENDERS_S, AgentSession, Rounds
from oobleck.master.config import MasterConfig
from oobleck.master.events.reports import (
    AgentRefused,
    EvaluationReceived,
    RecordsReceived,
    RecordsWait,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    WorkerReported,
)
from oobleck.master.inbox import Changes, Inbox
from oobleck.master.rules.nodes.admission import Refusal, admit
from oobleck.master.state.trust import Denied, check_caller
from oobleck.master.storage.ledger import Ledger
from oobleck.planner.ids import JobId, NodeName, WorkerId
from oobleck.proto.protocol import NEWEST
from oobleck.proto.types import NodeStatus, Registration, WorkerReport

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

log = logging.getLogger(__name__)


class Sessions:
    def __init__(
        self, config: MasterConfig, ledger: Ledger, inbox: Inbox, changes: Changes
    ) -> None:
        #: Messages that were dropped, by reason.
        self.refused: Counter[str] = Counter()
        #: And those that were taken, by kind.
        self.received: Counter[str] = Counter()
        self._timing = config.timing
        self._ledger = ledger
        self._inbox = inbox
        self._changes = changes
        self._to_senders = Rounds(SENDERS_S)
        self._to_all = Rounds(OTHERS_S)
        #: Sessions that records came from, since those were last acknowledged.
        self._senders: set[int] = set()
        self._open: dict[int, AgentSession] = {}
        self._last_number = 0

    def __iter__(self) -> Iterator[AgentSession]:
        return iter(list(self._open.values()))

    def of(self, node: NodeName) -> AgentSession | None:
        """Its newest one; None: none is open."""
        known = self._ledger.state.nodes.get(node)
        if known is None or known.seen.session is None:
            return None
        return self._open.get(known.seen.session)

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    @property
    def opened(self) -> int:
        """How many there were in this master's life."""
        return self._last_number

    # ---- what agents tell

    async def open(
        self, registration: Registration, caller: "Identity | None" = None
    ) -> AgentSession | Refusal:
        """`caller`: who registers; None: somebody on this host, where all is in the clear."""
        opened: list[AgentSession] = []

        def register(arrived_at: float) -> AgentSession | Refusal:
            verdict = self._register(registration, caller, arrived_at)
            if isinstance(verdict, AgentSession):
                opened.append(verdict)
            return verdict

        def closed(_: float) -> None:
            for session in opened:
                self.close(session)

        try:
            return await self._inbox.ask(register)
        except BaseException:
            # The agent is gone, and nobody else closes what is opened for it, maybe only later.
            self._inbox.post(closed)
            raise

    def _register(
        self, registration: Registration, caller: "Identity | None", arrived_at: float
    ) -> AgentSession | Refusal:
        facts, ledger = registration.facts, self._ledger
        try:
            if caller is not None:
                check_caller(ledger.state.trust, caller, ledger.unix())
        except Denied as denied:
            return Refusal(reason=str(denied), temporary=False)
        verdict = admit(ledger.state, registration, arrived_at, self._timing)
        if isinstance(verdict, Refusal):
            log.warning("agent refused", extra={"node": facts.node, "reason": verdict.reason})
            refused = AgentRefused(node=facts.node, incarnation=facts.incarnation)
            ledger.observe(refused, arrived_at)
            return verdict
        for event in verdict:
            ledger.journal(event)
        self._last_number += 1
        session = AgentSession(
            number=self._last_number,
            node=facts.node,
            incarnation=facts.incarnation,
            newer=facts.newest_protocol > NEWEST,
        )
        self._open[session.number] = session
        opened = StreamOpened(
            node=facts.node,
            session=session.number,
            status=registration.status,
            running=registration.running,
        )
        ledger.observe(opened, arrived_at)
        if ledger.state.active is not None:
            self._to_all.note(ledger.state.active)
        return session

    def close(self, session: AgentSession) -> None:
        def handle(arrived_at: float) -> None:
            self._open.pop(session.number, None)
            closed = StreamClosed(node=session.node, session=session.number)
            self._ledger.observe(closed, arrived_at)

        self._inbox.post(handle)

    async def receive(self, session: AgentSession, message: Incoming) -> None:
        """Hand over an agent's message; waits where too many of its messages wait."""
        await session.credit.acquire()

        def handle(arrived_at: float) -> None:
            session.credit.release()
            if session.number in self._open:
                self._take(session, message, arrived_at)
            else:
                self.refused["message of an ended session"] += 1

        self._inbox.post(handle)

    def _take(self, session: AgentSession, message: Incoming, arrived_at: float) -> None:
        ledger, archive = self._ledger, self._ledger.archive
        if not isinstance(message, NodeStatus) and message.job_id not in ledger.state.jobs:
            self.refused["message about an unknown job"] += 1
            return
        self.received[type(message).__name__] += 1
        match message:
            case NodeStatus():
                ledger.observe(StatusReceived(node=session.node, status=message), arrived_at)
            case WorkerReport(job_id=job_id, what=Evaluated(record=record)):
                # All workers tell of it, and the first one's goes to the disk.
                if archive.take_evaluation(job_id, record):
                    ledger.observe(EvaluationReceived(job_id=job_id, record=record), arrived_at)
            case WorkerReport():
                reported = WorkerReported(
                    worker=WorkerId(session.node, message.slot),
                    job_id=message.job_id,
                    incarnation=message.incarnation,
                    what=message.what,
                )
                ledger.observe(reported, arrived_at)
            case Output():
                worker = WorkerId(session.node, message.slot)
                archive.take_output(message.job_id, worker, message.lines, ledger.unix())
                self._changes.happened()
            case Records():
                self._take_records(session, message, arrived_at)

    def _take_records(self, session: AgentSession, message: Records, arrived_at: float) -> None:
        new = self._ledger.archive.take_records(message.job_id, message.records)
        if new:
            received = RecordsReceived(job_id=message.job_id, records=new)
            self._ledger.observe(received, arrived_at)
        self._senders.add(session.number)
        self._to_senders.note(message.job_id)
        self._to_all.note(message.job_id)

    def pass_over_lost(self, now: float, late_s: float) -> None:
        """Records that waited in vain for those of steps before wait no more."""
        for job_id, records in self._ledger.archive.pass_over_lost(now, late_s).items():
            self._ledger.observe(RecordsReceived(job_id=job_id, records=records), now)
            self._to_all.note(job_id)
        self._note_waiting(now)

    def _note_waiting(self, now: float) -> None:
        if (job := self._ledger.state.job) is None:
            return
        waiting = self._ledger.archive.has_waiting(job.id)
        if waiting != job.seen.steps.records_wait:
            self._ledger.observe(RecordsWait(job_id=job.id, waiting=waiting), now)

    # ---- what agents are told

    def brief(self) -> None:
        """Have every agent told what has changed for it."""
        for session in self:
            self._brief(session)

    def _brief(self, session: AgentSession) -> None:
        state = self._ledger.state
        node = state.nodes[session.node]
        if node.facts.incarnation != session.incarnation or not node.registered:
            reason = f"the master gave node {session.node} up: {node.reason}"
            self._end(session, Refusal(reason=reason, temporary=True))
        elif node.seen.session != session.number:
            replaced = Refusal(reason="a newer stream of this agent replaced it", temporary=True)
            self._end(session, replaced)
        elif session.told_version != node.desired.version:
            session.tell(state.assignment(node))

    @property
    def acknowledges_at(self) -> float | None:
        """When `acknowledge` has something to tell; None: it has not."""
        due = (self._to_senders.due_at, self._to_all.due_at)
        return min((at for at in due if at is not None), default=None)

    def acknowledge(self) -> None:
        """Have the agents told how far the records are on disk."""
        now = self._ledger.now()
        jobs, senders = self._to_senders.take(now, self._senders)
        self._senders.difference_update(senders)
        self._tell_stored(jobs, senders)
        self._tell_stored(*self._to_all.take(now, self._open))

    def _tell_stored(self, jobs: Iterable[JobId], sessions: Iterable[int]) -> None:
        """`sessions`: the numbers of some that are open, or were."""
        there = [self._open[number] for number in sessions if number in self._open]
        for job_id in jobs:
            stored_step = self._ledger.archive.metrics(job_id).stored_step
            for session in there:
                session.acknowledge(job_id, stored_step)

    def ask_again(self) -> None:
        """There is room on the disk again: records that were left are sent once more."""
        if self._ledger.archive.asks_again():
            again = Refusal(reason="to send again what the full disk did not take", temporary=True)
            for session in self:
                self._end(session, again)
        for job_id in self._ledger.state.jobs:
            self._to_all.note(job_id)

    def end_of(self, node: NodeName, refusal: Refusal) -> None:
        """End what sessions the node has, with this last word."""
        for session in self:
            if session.node == node:
                self._end(session, refusal)

    def _end(self, session: AgentSession, refusal: Refusal) -> None:
        del self._open[session.number]
        session.end(refusal)

"""Agents' sessions: admission, routing of their messages, and messages sent to each.

Handlers run in an iteration of the loop, in the order of arrival. Only the loop calls `brief` and
`acknowledge`, once everything that they send is on disk. Must not know gRPC.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Evaluated, Restored
from oobleck.master.clients.outbox import (
    MESSAGES_AT_ONCE,
    MESSAGES_PER_S,
    OTHERS_S,
    SENDERS_S,
    AgentSession,
    Budget,
    Rounds,
)
from oobleck.master.clients.witnesses import Confirmations
from oobleck.master.config import MasterConfig
from oobleck.master.events.unions import (
    AgentRefused,
    RecordsReceived,
    RecordsWait,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    WorkerReported,
)
from oobleck.master.inbox import Changes, Inbox, Incoming, Output, Records
from oobleck.master.rules.admission import Refusal, admit, next_term
from oobleck.master.rules.jobs import records_lost
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.node import Node
from oobleck.master.state.senders import believed, has_part, why_refused
from oobleck.master.state.trust import Denied, check_caller, was_revoked
from oobleck.master.storage.ledger import Ledger
from oobleck.proto.protocol import NEWEST
from oobleck.proto.reports import dropped_line
from oobleck.proto.types import Head, NodeStatus, Registration, WorkerReport

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

log = logging.getLogger(__name__)

#: Unregistered nodes whose quotas are kept, the newest.
_MOST_UNREGISTERED = 64
#: Registrations of one node per second, and in a burst.
_REGISTRATIONS_PER_S, _REGISTRATIONS_AT_ONCE = 1.0, 30
#: Rate and burst of terms that one node's reports may make this master begin.
_TERMS_PER_S, _TERMS_AT_ONCE = 1 / 600, 3
#: Rate and burst of bytes of its workers' output that are kept.
_OUTPUT_BYTES_PER_S, _OUTPUT_BYTES_AT_ONCE = 1 << 20, 16 << 20
#: Most distinct refusals of nodes' messages that are logged.
_MOST_LOGGED = 1000


@dataclass(slots=True)
class _Sender:
    """Quotas of one node, over all its sessions."""

    registrations: Budget = field(
        default_factory=lambda: Budget(_REGISTRATIONS_PER_S, _REGISTRATIONS_AT_ONCE)
    )
    pace: Budget = field(default_factory=lambda: Budget(MESSAGES_PER_S, MESSAGES_AT_ONCE))
    output: Budget = field(
        default_factory=lambda: Budget(_OUTPUT_BYTES_PER_S, _OUTPUT_BYTES_AT_ONCE)
    )
    #: Terms that its reports may make this master begin.
    terms: Budget = field(default_factory=lambda: Budget(_TERMS_PER_S, _TERMS_AT_ONCE))
    #: Lines of output that were dropped since the last kept ones.
    dropped: int = 0
    #: Head that it followed when its last registration was refused.
    followed: Head | None = None
    #: Processes of its newest status.
    processes: tuple[Incarnation, ...] = ()


class Sessions:
    def __init__(
        self,
        config: MasterConfig,
        ledger: Ledger,
        inbox: Inbox,
        changes: Changes,
        new_id: Callable[[], str],
    ) -> None:
        """Serve agents. `new_id` makes a random id."""
        self._new_id = new_id
        #: Dropped messages, by reason.
        self.refused: Counter[str] = Counter()
        #: Accepted messages, by kind.
        self.received: Counter[str] = Counter()
        self._timing = config.timing
        self._ledger = ledger
        self._inbox = inbox
        self._changes = changes
        self._to_senders = Rounds(SENDERS_S)
        self._to_all = Rounds(OTHERS_S)
        #: Sessions that have sent records since their last acknowledgement.
        self._senders: set[int] = set()
        self._open: dict[int, AgentSession] = {}
        self._last_number = 0
        self._by_node: dict[NodeName, _Sender] = {}
        self._confirmations = Confirmations(ledger, config.timing.heartbeat_s)
        #: Place of each process in the newest statuses.
        self._places: dict[Incarnation, WorkerId] = {}
        #: Refusals that were logged.
        self._logged: set[tuple[NodeName, str]] = set()

    def __iter__(self) -> Iterator[AgentSession]:
        return iter(list(self._open.values()))

    def of(self, node: NodeName) -> AgentSession | None:
        """Return the node's newest open session; None: none is open."""
        known = self._ledger.state.nodes.get(node)
        if known is None or known.seen.session is None:
            return None
        return self._open.get(known.seen.session)

    @property
    def count(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    @property
    def opened(self) -> int:
        """Number of sessions opened since this master started."""
        return self._last_number

    # ---- messages from agents

    def too_early(self, node: NodeName, now: float) -> Refusal | None:
        """Count a registration of the node; return the refusal if it comes too soon after others.
        It need not have been read: reading one takes longer than refusing it."""
        if self._sender(node).registrations.take(1, now):
            return None
        self._refuse(node, "a registration too soon after others")
        reason = f"node {node} registers more often than once a second"
        return Refusal(reason=reason, temporary=True)

    async def open(
        self, registration: Registration, caller: "Identity | None" = None
    ) -> AgentSession | Refusal:
        """Register an agent. `caller`: its identity, whose registration was counted; None: an agent
        on this host, in the clear."""
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
            # The agent has left: close its session, which may be opened only by a later handler.
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
            revoked = caller is not None and was_revoked(ledger.state.trust, caller)
            return Refusal(reason=str(denied), temporary=False, revoked=revoked)
        if caller is None and (refusal := self.too_early(facts.node, arrived_at)) is not None:
            return refusal
        self._begin_term(registration, arrived_at)
        verdict = admit(ledger.state, registration, arrived_at, self._timing)
        if isinstance(verdict, Refusal):
            # Log once: an agent that follows another head retries every second, for days.
            sender = self._sender(facts.node)
            if verdict.follows is None or verdict.follows != sender.followed:
                log.warning("agent refused", extra={"node": facts.node, "reason": verdict.reason})
            sender.followed = verdict.follows
            refused = AgentRefused(
                node=facts.node, incarnation=facts.incarnation, follows=verdict.follows
            )
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
            pace=self._sender(facts.node).pace,
        )
        self._open[session.number] = session
        opened = StreamOpened(
            node=facts.node,
            session=session.number,
            status=self._believed(facts.node, registration.status),
            running=registration.running,
            acted_on=registration.acted_on,
        )
        ledger.observe(opened, arrived_at)
        self._confirmations.begin_again(facts.node)
        if ledger.state.active is not None:
            self._to_all.note(ledger.state.active)
        return session

    def _begin_term(self, registration: Registration, now: float) -> None:
        """Begin a new term if the agent knows events that this journal lacks."""
        state, node = self._ledger.state, registration.facts.node
        began = next_term(state, registration.acted_on, self._new_id)
        if began is None:
            return
        if self._sender(node).terms.take(1, now):
            self._ledger.journal(began)
        else:
            self._refuse(node, "a term beyond this master's, again and again")

    def close(self, session: AgentSession) -> None:
        def handle(arrived_at: float) -> None:
            self._open.pop(session.number, None)
            closed = StreamClosed(node=session.node, session=session.number)
            self._ledger.observe(closed, arrived_at)

        self._inbox.post(handle)

    async def receive(self, session: AgentSession, message: Incoming) -> None:
        """Queue an agent's message; wait while too many of its messages are queued."""
        await session.credit.acquire()

        def handle(arrived_at: float) -> None:
            session.credit.release()
            if session.number in self._open:
                self._take(session, message, arrived_at)
            else:
                self.refused["message of an ended session"] += 1

        self._inbox.post(handle)

    def _take(self, session: AgentSession, message: Incoming, arrived_at: float) -> None:
        ledger, node = self._ledger, session.node
        if not isinstance(message, NodeStatus) and (
            message.job_id not in ledger.state.jobs or ledger.state.nodes[node].held is not None
        ):
            self.refused["message about an unknown job"] += 1
            return
        self.received[type(message).__name__] += 1
        match message:
            case NodeStatus():
                received = StatusReceived(node=node, status=self._believed(node, message))
                ledger.observe(received, arrived_at)
            case WorkerReport() if reason := self._why_refused(node, message):
                self._refuse(node, reason)
            case WorkerReport(job_id=job_id, what=Evaluated() as evaluated):
                reason = self._confirmations.evaluation(
                    job_id, node, evaluated.record, arrived_at, evaluated.restored_in
                )
                self._refuse(node, reason)
                self._to_all.note(job_id)
            case WorkerReport(job_id=job_id, what=Restored() as restored):
                self._refuse(node, self._confirmations.restore(job_id, node, restored, arrived_at))
            case WorkerReport():
                reported = WorkerReported(
                    worker=WorkerId(session.node, message.slot),
                    job_id=message.job_id,
                    incarnation=message.incarnation,
                    what=message.what,
                )
                ledger.observe(reported, arrived_at)
            case Output():
                self._take_output(node, message, arrived_at)
            case Records():
                self._take_records(session, message, arrived_at)

    def _why_refused(self, node: NodeName, report: WorkerReport) -> str:
        """Return why the report is refused; empty: it is not. A process that another node's status
        lists belongs to that node, even if it is in no plan."""
        if self._places.get(report.incarnation, own := WorkerId(node, report.slot)) != own:
            return "a report of another one's process"
        return why_refused(self._ledger.state, node, report)

    def _believed(self, node: NodeName, status: NodeStatus) -> NodeStatus:
        """Return the part of the status that counts. If two places claim a process, the first claim
        holds until its node is lost."""
        state = self._ledger.state
        known = believed(state, node, status)
        sender = self._sender(node)
        self._give_up(node, sender)
        if status.job_id is not None and (
            status.job_id not in state.jobs or state.nodes[node].held is not None
        ):
            # The node is held: no plan has these processes, and its own report alone decides how
            # long.
            sender.processes = ()
            return status
        own = tuple(
            worker
            for worker in known.workers
            if self._takes(worker.incarnation, WorkerId(node, worker.slot))
        )
        sender.processes = tuple(worker.incarnation for worker in own)
        if len(own) < len(status.workers):
            self._refuse(node, "a status with another one's process")
        return msgspec.structs.replace(known, workers=own)

    def _take_output(self, node: NodeName, message: Output, arrived_at: float) -> None:
        if not has_part(self._ledger.state, node, message.job_id):
            self._refuse(node, "output of a job that it has no part in")
            return
        sender, lines = self._sender(node), message.lines
        if not sender.output.take(sum(len(line.encode()) for line in lines), arrived_at):
            sender.dropped += len(lines)
            self.refused["lines of output, too many at once"] += len(lines)
            return
        if sender.dropped:
            lines = (dropped_line(sender.dropped), *lines)
            sender.dropped = 0
        worker = WorkerId(node, message.slot)
        self._ledger.archive.take_output(message.job_id, worker, lines, self._ledger.unix())
        self._changes.happened()

    def _take_records(self, session: AgentSession, message: Records, arrived_at: float) -> None:
        node = session.node
        for reason in self._confirmations.records(
            message.job_id, node, message.records, arrived_at, message.restored_in
        ):
            self._refuse(node, reason)
        self._senders.add(session.number)
        self._to_senders.note(message.job_id)
        self._to_all.note(message.job_id)

    def _sender(self, node: NodeName) -> _Sender:
        if node not in self._by_node:
            known = self._ledger.state.nodes
            unregistered = [other for other in self._by_node if other not in known]
            for other in unregistered[:-_MOST_UNREGISTERED]:
                self._give_up(other, self._by_node.pop(other))
            self._by_node[node] = _Sender()
        return self._by_node[node]

    def _takes(self, process: Incarnation, place: WorkerId) -> bool:
        """Assign the process to the place if it is free, and return whether it is there."""
        known, nodes = self._places.get(process), self._ledger.state.nodes
        if known is None or known.node not in nodes or not nodes[known.node].registered:
            known = self._places[process] = place
        return known == place

    def _give_up(self, node: NodeName, sender: _Sender) -> None:
        """Free the places of the processes in the node's newest status."""
        for process in sender.processes:
            if (place := self._places.get(process)) is not None and place.node == node:
                del self._places[process]

    def _refuse(self, node: NodeName, reason: str) -> None:
        """Count a refusal, and log it once; empty: nothing is refused."""
        if not reason:
            return
        self.refused[reason] += 1
        if (node, reason) not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add((node, reason))
            log.warning("an agent's word does not count", extra={"node": node, "why": reason})

    def pass_over_lost(self, now: float, late_s: float) -> None:
        """Give up waiting for missing records: write those that wait for them, or for another
        node's report."""
        for node in self._confirmations.look(now):
            reason = "to send again the records that were too many to keep"
            self.end_of(node, Refusal(reason=reason, temporary=True))
        ledger = self._ledger
        for job_id in ledger.archive.held_up():
            self._go_on(job_id, now)
        for job_id, lost in ledger.archive.given_up(now, late_s).items():
            ledger.journal(records_lost(ledger.state.jobs[job_id], lost))
            self._go_on(job_id, now)
        self._note_waiting(now)

    def _go_on(self, job_id: JobId, now: float) -> None:
        """Take the records that have waited for earlier ones."""
        if records := self._ledger.archive.take_records(job_id, ()):
            self._ledger.observe(RecordsReceived(job_id=job_id, records=records), now)
            self._to_all.note(job_id)

    def _note_waiting(self, now: float) -> None:
        if (job := self._ledger.state.job) is None:
            return
        waiting = self._ledger.archive.has_waiting(job.id)
        waiting |= self._confirmations.wait_long(job.id, now)
        if waiting != job.seen.steps.records_wait:
            self._ledger.observe(RecordsWait(job_id=job.id, waiting=waiting), now)

    # ---- messages to agents

    def brief(self) -> None:
        """Send every agent its changes."""
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
        elif session.held and _is_of_a_job_here(state, node):
            again = "to repeat reports on a job that has become this master's"
            self._end(session, Refusal(reason=again, temporary=True))
        elif node.held is None and session.sent_version != node.desired.version:
            session.assign(state.assignment(node))
        session.held = node.held is not None

    @property
    def acknowledges_at(self) -> float | None:
        """Time at which `acknowledge` has something to send; None: nothing to send."""
        due = (self._to_senders.due_at, self._to_all.due_at)
        return min((at for at in due if at is not None), default=None)

    def acknowledge(self) -> None:
        """Acknowledge to agents the records that are on disk."""
        now = self._ledger.now()
        jobs, senders = self._to_senders.take(now, self._senders)
        self._senders.difference_update(senders)
        self._acknowledge_stored(jobs, senders)
        self._acknowledge_stored(*self._to_all.take(now, self._open))

    def _acknowledge_stored(self, jobs: Iterable[JobId], sessions: Iterable[int]) -> None:
        """Acknowledge `jobs` to the open ones of these `sessions` (numbers)."""
        open_sessions = [self._open[number] for number in sessions if number in self._open]
        for job_id in jobs:
            archive = self._ledger.archive
            stored = archive.metrics(job_id).stored_step, archive.evaluations(job_id).stored_step
            for session in open_sessions:
                session.acknowledge(job_id, *stored)

    def ask_again(self) -> None:
        """Make agents resend records that a full disk did not take: end their sessions, since they
        resend on registering. Acknowledgements of all jobs become due."""
        if self._ledger.archive.asks_again():
            again = Refusal(reason="to send again what the full disk did not take", temporary=True)
            for session in self:
                self._end(session, again)
        for job_id in self._ledger.state.jobs:
            self._to_all.note(job_id)

    def end_of(self, node: NodeName, refusal: Refusal) -> None:
        """End the node's sessions with this refusal."""
        for session in self:
            if session.node == node:
                self._end(session, refusal)

    def _end(self, session: AgentSession, refusal: Refusal) -> None:
        del self._open[session.number]
        session.end(refusal)


def _is_of_a_job_here(state: ClusterState, node: Node) -> bool:
    """Return whether the node, which was held, now trains a job of this master."""
    is_taken_over = node.held is None and not node.stale_workers
    return is_taken_over and node.seen.status.job_id in state.jobs

"""The owner of the state: takes what comes in, decides, puts it on disk, and tells the agents.

One task runs `Master.run`; nobody else writes to the state. Each turn takes everything that has
arrived, applies it, lets `reconcile` decide until nothing is left to decide, commits the journal,
and only then lets the outside world see anything of it. Reading the state between turns is safe
for every task of the same event loop. Must not know gRPC.
"""

import asyncio
import logging
from collections import Counter
from datetime import UTC, datetime
from typing import TypeVar

from oobleck.host.surroundings import Surroundings
from oobleck.master.admit import Refusal, admit
from oobleck.master.apply import apply
from oobleck.master.config import MasterConfig
from oobleck.master.decision import Decision
from oobleck.master.dispatch import Acknowledger, AgentSession, PlanSerialiser
from oobleck.master.evaluations import EvaluationLog
from oobleck.master.eventlog import EventLog
from oobleck.master.events import (
    AgentRefused,
    CheckpointRequested,
    EvaluationReceived,
    JobCancelRequested,
    JobEnded,
    JobFailed,
    JobRestored,
    JobSubmitted,
    Journaled,
    MasterStarted,
    NodeDrainRequested,
    NodeUndrained,
    Observed,
    ProfileChosen,
    RecordsReceived,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    Tick,
)
from oobleck.master.inbox import Changes, Inbox
from oobleck.master.incoming import Incoming, Output, Records, event_of
from oobleck.master.journal import Journal
from oobleck.master.logs import LogStore
from oobleck.master.metrics import MetricsLog
from oobleck.master.narrate import tell
from oobleck.master.profiles import read_profiles, write_profile
from oobleck.master.reconcile import reconcile
from oobleck.master.records import records_of
from oobleck.master.state import ENDED, ClusterState
from oobleck.master.storage import storing
from oobleck.master.timelines import Timelines
from oobleck.master.trust import Decide, Denied
from oobleck.master.trustevents import CredentialsRevoked
from oobleck.planner.ids import JobId, NodeName, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.jobfile import format_job
from oobleck.planner.profile import Profile
from oobleck.proto.types import NodeStatus, Registration, WorkerReport

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The loop looks at least this often, so that it notices when it is late.
_TICK_S = 0.25
#: Decisions of one turn; more would never end.
_MOST_DECISIONS = 1000
#: Most of a job's name that becomes part of its id.
_NAME_IN_ID = 48


class Master:
    def __init__(
        self, config: MasterConfig, journal: Journal, surroundings: Surroundings | None = None
    ) -> None:
        self.config = config
        self._surroundings = surroundings or Surroundings()
        self.now = self._surroundings.now
        self._unix = self._surroundings.unix
        self.state = ClusterState()
        self.events = EventLog(config.state_dir)
        self.logs = LogStore(config.state_dir)
        self.changes = Changes()
        #: Messages that were dropped, by reason.
        self.refused: Counter[str] = Counter()
        self._journal = journal
        self._metrics: dict[JobId, MetricsLog] = {}
        self._evaluations: dict[JobId, EvaluationLog] = {}
        self._acknowledger = Acknowledger()
        self._serialise = PlanSerialiser()
        self._sessions: dict[int, AgentSession] = {}
        self.timelines = Timelines(lambda: list(self._sessions.values()))
        self._last_session = 0
        self._inbox = Inbox(self.now)
        self._wake_at: float | None = None
        #: Something changed that has not been decided on and told yet.
        self._dirty = True
        self._reason = ""
        self._job_texts: dict[JobId, str] = {}
        self._replay()

    def _replay(self) -> None:
        now = self.now()
        for unix, event in self._journal.replay():
            self._fold(event, now, unix)
        self._record(MasterStarted())
        for job in self.state.jobs.values():
            records = self._metrics_of(job.id).recent
            self._observe(RecordsReceived(job_id=job.id, records=records), now)
            if (last := self._evaluations_of(job.id).last) is not None:
                self._observe(EvaluationReceived(job_id=job.id, record=last), now)
        self._find_profiles()
        self._journal.commit()
        self._write_events()

    def _find_profiles(self) -> None:
        """Operators may add, replace and remove the files."""
        self._observe(read_profiles(self.config.profiles), self.now())

    def _write_events(self) -> None:
        with storing(self.config.state_dir / "jobs"):
            self.events.write()

    def _metrics_of(self, job_id: JobId) -> MetricsLog:
        if job_id not in self._metrics:
            path = self.config.job_directory(job_id) / "metrics.jsonl"
            with storing(path):
                self._metrics[job_id] = MetricsLog(path)
        return self._metrics[job_id]

    def _evaluations_of(self, job_id: JobId) -> EvaluationLog:
        if job_id not in self._evaluations:
            path = self.config.job_directory(job_id) / "evaluations.jsonl"
            with storing(path):
                self._evaluations[job_id] = EvaluationLog(path)
        return self._evaluations[job_id]

    def close(self) -> None:
        self._inbox.close()
        for metrics in self._metrics.values():
            metrics.close()

    # ---- changes of the state

    def _record(self, event: Journaled) -> None:
        """Journal the event and apply it. Nobody outside sees it before the turn's commit."""
        unix = self._unix()
        self._journal.append(event, unix)
        tell(event)
        self._fold(event, self.now(), unix)
        if isinstance(event, ProfileChosen) and event.source == "measured":
            self._store_profile(event, unix)
        if isinstance(event, JobEnded):
            self._metrics_of(event.job_id).close()

    def _store_profile(self, event: ProfileChosen, unix: float) -> None:
        if event.profile is None or not event.key:
            return
        notes = {**event.notes, "date": datetime.fromtimestamp(unix, UTC).isoformat("T", "seconds")}
        with storing(self.config.profiles):
            write_profile(self.config.profiles, event.key, event.profile, notes)
        self._find_profiles()

    def _fold(self, event: Journaled, now: float, unix: float) -> None:
        for job_id, record in records_of(self.state, event, unix):
            self.events.add(job_id, record, unix)
        self._dirty |= apply(self.state, event, now=now, unix=unix)
        if isinstance(event, JobRestored) and event.resumed:
            self._metrics_of(event.job_id).start_after(event.restored.step)

    def _observe(self, event: Observed, at: float) -> None:
        self._dirty |= apply(self.state, event, now=at, unix=self._unix())

    # ---- the loop

    async def run(self) -> None:
        """Never returns; ends by cancellation, StorageFailed or a broken invariant."""
        while True:
            looked_at = self.now()
            await self._turn()
            wake_at = looked_at + _TICK_S
            for at in (self._wake_at, self._acknowledger.due_at):
                wake_at = wake_at if at is None else min(wake_at, at)
            await self._inbox.wait(wake_at - self.now())
            late_s = self.now() - looked_at - _TICK_S
            if late_s > self.config.timing.lag_limit_s:
                log.warning(
                    "the master was late; leases last as much longer", extra={"late_s": late_s}
                )
                cut = late_s >= self.config.timing.ping_timeout_s
                self._observe(Tick(late_s=late_s, cut=cut), self.now())

    async def _turn(self) -> None:
        self._inbox.handle_all()
        if self._dirty or self._wake_at is None or self.now() >= self._wake_at:
            await self._decide()
        if self._dirty:
            self._journal.commit()
            self._write_events()
            for session in list(self._sessions.values()):
                self._brief(session)
            self._dirty = False
            self.changes.happened()
        for job_id in self._acknowledger.take(self.now()):
            for session in self._sessions.values():
                session.acknowledge(job_id, self._metrics_of(job_id).through_step)
        self._inbox.answer_all()

    async def _decide(self) -> None:
        # One moment for the whole turn: while a plan is computed, nobody's lease runs out.
        now = self.now()
        decision = Decision()
        for _ in range(_MOST_DECISIONS):
            self._journal.commit()  # others may look at the state while this waits
            # In a thread, since a large plan takes seconds and operators want answers meanwhile.
            # Nothing changes the state under it: that is for this task alone.
            decision = await asyncio.to_thread(self._reconcile, now)
            self._wake_at = decision.wake_at
            if not decision.actions:
                if decision.reason != self._reason:
                    log.info("nothing to do", extra={"reason": decision.reason or "all is well"})
                    self._reason = decision.reason
                return
            for event in decision.actions:
                self._record(event)
        raise RuntimeError(f"decisions do not end; the last: {decision.reason}")

    def _reconcile(self, now: float) -> Decision:
        nonce = self._surroundings.token(16)
        try:
            return reconcile(self.state, now, self.config.timing, nonce=nonce)
        except Exception as error:
            # One job that cannot be planned must not take the cluster along.
            job = self.state.job
            if job is None:
                raise
            log.exception("planning failed", extra={"job": job.id})
            failed = JobFailed(job_id=job.id, reason=f"internal error while planning: {error!r}")
            return Decision(actions=(failed,), reason=failed.reason)

    def _brief(self, session: AgentSession) -> None:
        """Have the agent told what has changed for it."""
        node = self.state.nodes[session.node]
        if node.facts.incarnation != session.incarnation or not node.registered:
            reason = f"the master gave node {session.node} up: {node.reason}"
            self._drop(session, Refusal(reason=reason, temporary=True))
        elif node.seen.session != session.number:
            replaced = Refusal(reason="a newer stream of this agent replaced it", temporary=True)
            self._drop(session, replaced)
        elif session.told_version != node.desired.version:
            job_id = node.desired.job_id
            text = self._job_text(job_id) if job_id else ""
            assignment = self.state.assignment(node, text)
            session.tell(assignment, self._serialise(assignment.plan))

    def _drop(self, session: AgentSession, refusal: Refusal) -> None:
        del self._sessions[session.number]
        session.end(refusal)

    def _job_text(self, job_id: JobId) -> str:
        if job_id not in self._job_texts:
            self._job_texts[job_id] = format_job(self.state.jobs[job_id].spec)
        return self._job_texts[job_id]

    # ---- what operators ask

    async def submit(
        self,
        request_id: str,
        spec: JobSpec,
        *,
        profile: Profile | None = None,
        profile_only: bool = False,
    ) -> JobId:
        """`profile`: of the file that the job names; `profile_only`: end once it is measured."""

        def answer(_: float) -> JobId:
            known = self.state.requests.get(request_id)
            if known is not None:
                return known
            job_id = JobId(f"{spec.name[:_NAME_IN_ID]}-{len(self.state.jobs) + 1}")
            self._find_profiles()
            submitted = JobSubmitted(
                job_id=job_id,
                request_id=request_id,
                spec=spec,
                profile=profile,
                profile_only=profile_only,
            )
            self._record(submitted)
            return job_id

        return await self._inbox.ask(answer)

    async def save(self, request_id: str, job_id: JobId) -> int:
        """The number of the request for a checkpoint of the job, which is known."""

        def answer(_: float) -> int:
            job = self.state.jobs[job_id]
            if (known := job.save_numbers.get(request_id)) is not None:
                return known
            number = job.save_request + 1
            self._record(CheckpointRequested(job_id=job_id, request_id=request_id, number=number))
            return number

        return await self._inbox.ask(answer)

    async def drain(self, request_id: str, node: NodeName, reason: str, *, force: bool) -> None:
        """`node` is known."""

        def answer(_: float) -> None:
            if request_id not in self.state.node_requests:
                self._record(
                    NodeDrainRequested(node=node, request_id=request_id, reason=reason, force=force)
                )

        await self._inbox.ask(answer)

    async def undrain(self, request_id: str, node: NodeName) -> None:
        """`node` is known."""

        def answer(_: float) -> None:
            if request_id not in self.state.node_requests:
                self._record(NodeUndrained(node=node, request_id=request_id))

        await self._inbox.ask(answer)

    async def cancel(self, request_id: str, job_id: JobId) -> None:
        """`job_id` is known."""

        def answer(_: float) -> None:
            job = self.state.jobs[job_id]
            if job.state not in ENDED and not job.cancel_requested:
                self._record(JobCancelRequested(job_id=job_id, request_id=request_id))

        await self._inbox.ask(answer)

    async def change_trust(self, decide: Decide[T]) -> T:
        """What `decide` answers, once what it wants journaled is. Raises Denied."""

        def answer(_: float) -> tuple[T] | Denied:
            try:
                event, value = decide(self.state.trust, self._unix())
            except Denied as denied:
                return denied
            self._record(event)
            if isinstance(event, CredentialsRevoked) and event.role == "agent":
                refusal = Refusal(reason="its certificate was revoked", temporary=False)
                for session in [s for s in self._sessions.values() if s.node == event.name]:
                    self._drop(session, refusal)
            return (value,)

        answered = await self._inbox.ask(answer)
        if isinstance(answered, Denied):
            raise answered
        return answered[0]

    # ---- what agents tell

    async def open_session(self, registration: Registration) -> AgentSession | Refusal:
        facts = registration.facts

        def answer(arrived_at: float) -> AgentSession | Refusal:
            verdict = admit(self.state, registration, arrived_at, self.config.timing)
            if isinstance(verdict, Refusal):
                log.warning("agent refused", extra={"node": facts.node, "reason": verdict.reason})
                refused = AgentRefused(node=facts.node, incarnation=facts.incarnation)
                self._observe(refused, arrived_at)
                return verdict
            for event in verdict:
                self._record(event)
            self._last_session += 1
            session = AgentSession(
                number=self._last_session, node=facts.node, incarnation=facts.incarnation
            )
            self._sessions[session.number] = session
            opened = StreamOpened(
                node=facts.node, session=session.number, status=registration.status
            )
            self._observe(opened, arrived_at)
            if self.state.active is not None:
                self._acknowledger.note(self.state.active)
            return session

        return await self._inbox.ask(answer)

    def close_session(self, session: AgentSession) -> None:
        def handle(arrived_at: float) -> None:
            self._sessions.pop(session.number, None)
            closed = StreamClosed(node=session.node, session=session.number)
            self._observe(closed, arrived_at)

        self._inbox.post(handle)

    async def receive(self, session: AgentSession, message: Incoming) -> None:
        """Hand over an agent's message; waits where too many of its messages wait."""
        await session.credit.acquire()

        def handle(arrived_at: float) -> None:
            session.credit.release()
            if session.number in self._sessions:
                self._take(session, message, arrived_at)
            else:
                self.refused["message of an ended session"] += 1

        self._inbox.post(handle)

    def _take(self, session: AgentSession, message: Incoming, arrived_at: float) -> None:
        if not isinstance(message, NodeStatus) and message.job_id not in self.state.jobs:
            self.refused["message about an unknown job"] += 1
            return
        match message:
            case NodeStatus():
                self._observe(StatusReceived(node=session.node, status=message), arrived_at)
            case WorkerReport():
                event = event_of(WorkerId(session.node, message.slot), message)
                if not isinstance(event, EvaluationReceived) or self._store_evaluation(event):
                    self._observe(event, arrived_at)
            case Output():
                worker = WorkerId(session.node, message.slot)
                with storing(self.config.job_directory(message.job_id) / "logs"):
                    self.logs.append(message.job_id, worker, message.lines, self._unix())
                self.changes.happened()
            case Records():
                self._take_records(message, arrived_at)

    def _store_evaluation(self, event: EvaluationReceived) -> bool:
        """Returns whether it is a new one."""
        evaluations = self._evaluations_of(event.job_id)
        with storing(self.config.job_directory(event.job_id) / "evaluations.jsonl"):
            return evaluations.append(event.record)

    def _take_records(self, message: Records, arrived_at: float) -> None:
        metrics = self._metrics_of(message.job_id)
        with storing(self.config.job_directory(message.job_id) / "metrics.jsonl"):
            written = metrics.append(message.records)
        if written:
            received = RecordsReceived(job_id=message.job_id, records=written)
            self._observe(received, arrived_at)
        if self.state.jobs[message.job_id].state in ENDED:
            metrics.close()
        self._acknowledger.note(message.job_id)

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
from oobleck.master import crash
from oobleck.master.admit import Refusal, admit
from oobleck.master.apply import apply
from oobleck.master.archive import Archive
from oobleck.master.config import MasterConfig
from oobleck.master.decision import Decision
from oobleck.master.dispatch import Acknowledger, AgentSession, PlanSerialiser
from oobleck.master.events import JournalCut, Journaled, MasterStarted
from oobleck.master.inbox import Changes, Inbox
from oobleck.master.incoming import Incoming, Output, Records, event_of
from oobleck.master.job import ENDED
from oobleck.master.jobevents import (
    CheckpointRequested,
    JobCancelRequested,
    JobEnded,
    JobFailed,
    JobRestored,
    JobSubmitted,
    ProfileChosen,
)
from oobleck.master.journal import Journal, Snapshot
from oobleck.master.narrate import tell
from oobleck.master.nodeevents import NodeDrainRequested, NodeUndrained
from oobleck.master.observations import (
    AgentRefused,
    EvaluationReceived,
    Observed,
    RecordsReceived,
    StatusReceived,
    StreamClosed,
    StreamOpened,
    Tick,
)
from oobleck.master.profiles import read_profiles, write_profile
from oobleck.master.reconcile import reconcile
from oobleck.master.records import records_of
from oobleck.master.snapshot import restore, take
from oobleck.master.state import ClusterState
from oobleck.master.storage import StorageFailed, storing
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
_MAY_BE_DONE = "what was asked may still be done once it can be written"
#: Between two tries to write a journal that takes nothing.
_STUCK_S = 0.5
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
        self.archive = Archive(config)
        self.changes = Changes()
        #: Messages that were dropped, by reason.
        self.refused: Counter[str] = Counter()
        self._journal = journal
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
        #: Not even the journal can be written.
        self._stuck = False
        self._job_texts: dict[JobId, str] = {}
        self._replay()

    def _replay(self) -> None:
        """Raises JournalUnusable, StorageFailed."""
        now, archive = self.now(), self.archive
        for unix, entry in self._journal.replay():
            if isinstance(entry, Snapshot):
                self._restore(entry, now)
            else:
                self._fold(entry, now, unix)
        if self._journal.cut is not None or archive.events.ahead():
            self._record(self._cut())
        self._record(MasterStarted())
        for job in self.state.jobs.values():
            archive.metrics(job.id).start_after(job.resumed_step)
            records = archive.metrics(job.id).recent
            self._observe(RecordsReceived(job_id=job.id, records=records), now)
            if (last := archive.evaluations(job.id).last) is not None:
                self._observe(EvaluationReceived(job_id=job.id, record=last), now)
        self._find_profiles()
        while not self._commit():
            if not archive.storage.give_way():
                raise StorageFailed(archive.storage.problem)
        archive.write()
        self._compact()

    def _restore(self, snapshot: Snapshot, now: float) -> None:
        try:
            self.state, given = restore(snapshot.content, now)
        except ValueError as error:
            raise self._journal.unusable(str(error)) from error
        self.archive.events.resume(given)

    def _cut(self) -> JournalCut:
        cut = self._journal.cut
        return JournalCut(
            bytes=cut.bytes if cut is not None else 0,
            kept_as=cut.kept_as if cut is not None else "",
            records=self.archive.events.ahead(),
        )

    def _compact(self) -> None:
        """Begin the journal anew with what it has led to, where that is much shorter."""
        if not self._journal.wants_compaction or self.archive.storage.problem:
            return
        self.archive.write()
        try:
            self.archive.events.sync()  # records of before are not made again
            self._journal.compact(take(self.state, self.archive.events.given), self._unix())
        except StorageFailed as failed:
            self.archive.storage.failed(failed)

    @property
    def problem(self) -> str:
        """For operators: what keeps the master from storing; empty: nothing."""
        return self.archive.storage.problem

    def _find_profiles(self) -> None:
        """Operators may add, replace and remove the files."""
        self._observe(read_profiles(self.config.profiles), self.now())

    def close(self) -> None:
        self._inbox.close()
        self.archive.close()

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
            self.archive.end(event.job_id)

    def _store_profile(self, event: ProfileChosen, unix: float) -> None:
        if event.profile is None or not event.key:
            return
        notes = {**event.notes, "date": datetime.fromtimestamp(unix, UTC).isoformat("T", "seconds")}
        try:
            with storing(self.config.profiles):
                write_profile(self.config.profiles, event.key, event.profile, notes)
        except StorageFailed as failed:
            log.warning("the profile is not stored", extra={"reason": str(failed)})
        self._find_profiles()

    def _fold(self, event: Journaled, now: float, unix: float) -> None:
        if isinstance(event, JournalCut):
            self.archive.events.resume(event.records)
        for job_id, record in records_of(self.state, event, unix):
            self.archive.events.add(job_id, record, unix)
        self._dirty |= apply(self.state, event, now=now, unix=unix)
        if isinstance(event, JobRestored) and event.resumed:
            self.archive.metrics(event.job_id).start_after(event.restored.step)

    def _observe(self, event: Observed, at: float) -> None:
        self._dirty |= apply(self.state, event, now=at, unix=self._unix())

    # ---- the loop

    async def run(self) -> None:
        """Never returns; ends by cancellation or a broken invariant."""
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
        if self.archive.storage.look(self.now()):
            self._go_on_storing()
        if self._dirty or self._wake_at is None or self.now() >= self._wake_at:
            await self._decide()
        changed, self._dirty = self._dirty, False
        if changed:
            crash.reach("applied")
            await self._store()
            crash.reach("committed")
            for session in list(self._sessions.values()):
                self._brief(session)
            crash.reach("told")
        self.archive.write()
        if changed:
            self._compact()
            self.changes.happened()
        for job_id in self._acknowledger.take(self.now()):
            for session in self._sessions.values():
                session.acknowledge(job_id, self.archive.metrics(job_id).stored_step)
        self._inbox.answer_all()

    async def _store(self) -> None:
        """Have the journal on disk. Where it takes nothing, nobody is told anything until it does:
        the master is late then, which convicts nobody."""
        while not self._commit():
            if not self.archive.storage.give_way():
                self._stuck = True
                self._inbox.refuse(StorageFailed(f"{self.problem}; {_MAY_BE_DONE}"))
                self.changes.happened()
                await asyncio.sleep(_STUCK_S)
        self._stuck = False

    def _commit(self) -> bool:
        try:
            self._journal.commit()
        except StorageFailed as failed:
            self.archive.storage.failed(failed)
            return False
        return True

    def _go_on_storing(self) -> None:
        """There is room again."""
        self._dirty = True
        if self.archive.asks_again():
            again = Refusal(reason="to send again what the full disk did not take", temporary=True)
            for session in list(self._sessions.values()):
                self._drop(session, again)
        for job_id in self.state.jobs:
            self._acknowledger.note(job_id)

    async def _decide(self) -> None:
        # One moment for the whole turn: while a plan is computed, nobody's lease runs out.
        now = self.now()
        decision = Decision()
        for _ in range(_MOST_DECISIONS):
            await self._store()  # others may look at the state while this waits
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
        """`profile`: of the file that the job names; `profile_only`: end once it is measured.

        Raises StorageFailed.
        """
        if self.problem and request_id not in self.state.requests:
            raise StorageFailed(self.problem)

        def answer(_: float) -> JobId:
            known = self.state.requests.get(request_id)
            if known is not None:
                return known
            job_id = self._new_job_id(spec)
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

        return await self._inbox.ask(answer, of_operator=True)

    def _new_job_id(self, spec: JobSpec) -> JobId:
        """One that no folder of an earlier job has either, whatever became of its journal."""
        number = len(self.state.jobs) + 1
        while True:
            job_id = JobId(f"{spec.name[:_NAME_IN_ID]}-{number}")
            if job_id not in self.state.jobs and not self.config.job_directory(job_id).exists():
                return job_id
            number += 1

    def _check_not_stuck(self) -> None:
        if self._stuck:
            raise StorageFailed(self.problem)

    async def save(self, request_id: str, job_id: JobId) -> int:
        """The number of the request for a checkpoint of the job, which is known.

        Raises StorageFailed.
        """
        self._check_not_stuck()

        def answer(_: float) -> int:
            job = self.state.jobs[job_id]
            if (known := job.save_numbers.get(request_id)) is not None:
                return known
            number = job.save_request + 1
            self._record(CheckpointRequested(job_id=job_id, request_id=request_id, number=number))
            return number

        return await self._inbox.ask(answer, of_operator=True)

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
        """`job_id` is known. Raises StorageFailed."""
        self._check_not_stuck()

        def answer(_: float) -> None:
            job = self.state.jobs[job_id]
            if job.state not in ENDED and not job.cancel_requested:
                self._record(JobCancelRequested(job_id=job_id, request_id=request_id))

        await self._inbox.ask(answer, of_operator=True)

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
                node=facts.node,
                session=session.number,
                status=registration.status,
                running=registration.running,
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
                new = True
                if isinstance(event, EvaluationReceived):
                    new = self.archive.take_evaluation(event.job_id, event.record)
                if new:
                    self._observe(event, arrived_at)
            case Output():
                worker = WorkerId(session.node, message.slot)
                self.archive.take_output(message.job_id, worker, message.lines, self._unix())
                self.changes.happened()
            case Records():
                self._take_records(message, arrived_at)

    def _take_records(self, message: Records, arrived_at: float) -> None:
        new = self.archive.take_records(message.job_id, message.records)
        if new:
            received = RecordsReceived(job_id=message.job_id, records=new)
            self._observe(received, arrived_at)
        self._acknowledger.note(message.job_id)

"""Loop that owns the state: takes messages, decides, journals, and informs the agents.

One task runs `Master.run`, the only writer of the state. Each iteration takes everything that has
arrived, applies it, and lets `reconcile` decide until nothing is left to decide. Then it commits
the journal, and only then makes the results visible outside. Reading the state between iterations
is safe for every task of the same event loop. Must not know gRPC.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oobleck.host.metrics import SHORT_S, Distribution, Durations
from oobleck.host.system.environment import Environment
from oobleck.master import process
from oobleck.master.clients.examinations import Examinations
from oobleck.master.clients.requests import Adoptions, Requests
from oobleck.master.clients.sessions import Sessions
from oobleck.master.clients.timelines import Timelines
from oobleck.master.config import MasterConfig
from oobleck.master.events.jobs import JobFailed
from oobleck.master.events.unions import Event, NodesIdle, Tick
from oobleck.master.inbox import Changes, Inbox
from oobleck.master.planning.requests import Planner
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.next_plan import Foresight
from oobleck.master.rules.reconcile import reconcile
from oobleck.master.state.cluster import ID_BYTES, ClusterState
from oobleck.master.state.job import Job
from oobleck.master.storage.cluster_log import Numbered
from oobleck.master.storage.disk import StorageFailed
from oobleck.master.storage.journal import Journal
from oobleck.master.storage.ledger import Ledger

log = logging.getLogger(__name__)
#: Longest interval between iterations, so that the loop notices its own delay.
_TICK_S = 0.25
#: After an iteration longer than the first, messages gather for a multiple of its duration, at most
#: the last. A thousand nodes that enter a plan send thousands of messages within a second. An
#: iteration for every few of them would leave no time for other tasks.
_SHORT_ITERATION_S = 2e-3
_REST_FACTOR = 2.0
_LONGEST_REST_S = 20e-3
#: Most messages and questions handled per iteration, so that other tasks get to run.
_MOST_HANDLED = 200
#: Decisions per iteration; more would never end.
_MOST_DECISIONS = 1000
_MAY_BE_DONE = "what was asked may still be done once it can be written"
#: Interval between attempts to write a failing journal.
_STUCK_S = 0.5


@dataclass(slots=True)
class Vitals:
    #: Iterations of the loop.
    iterations: Durations = field(default_factory=lambda: Durations(SHORT_S))
    #: Number of iterations that began late, and the sum of their delays.
    late_times: int = 0
    late_s: float = 0.0


class Master:
    def __init__(
        self,
        config: MasterConfig,
        journal: Journal,
        environment: Environment | None = None,
        planner: Planner | None = None,
    ) -> None:
        """Load the state. `planner`: makes the plans; None: the loop does, and handles no messages
        then. Raises JournalUnusable, StorageFailed."""
        self._planner = planner or AtOnce()
        self._planner.listen(self._planned)
        self._environment = environment or Environment()
        self.config = config
        self.now, self.unix = self._environment.now, self._environment.unix
        self.vitals = Vitals()
        self.changes = Changes()
        self._ledger = Ledger(config, journal, self._environment)
        #: Read-only.
        self.state = self._ledger.state
        self.archive = self._ledger.archive
        self._inbox = Inbox(self.now)
        self.sessions = Sessions(
            config,
            self._ledger,
            self._inbox,
            self.changes,
            new_id=lambda: self._environment.token(ID_BYTES),
        )
        self.requests = Requests(config, self._ledger, self._inbox, self.sessions.end_of)
        self.timelines = Timelines(lambda: list(self.sessions))
        self.examinations = Examinations(config, self.state, self._environment, self.sessions.of)
        self.adoptions = Adoptions(self.state, self._environment, self.sessions.of)
        self._foresight = Foresight()
        self._wake_at: float | None = None
        self._reason = ""

    @property
    def problem(self) -> str:
        """Storage problem, as text for operators; empty: none."""
        return self._ledger.problem

    @property
    def waiting(self) -> int:
        """Number of queued messages and questions."""
        return self._inbox.waiting

    @property
    def commits(self) -> Distribution:
        """Distribution of the seconds that commits of events to the disk took."""
        return self._ledger.commits.read()

    def committed(self) -> int:
        """Return the sequence number of the last event on disk. Raises StorageFailed while none can
        be written: files may be ahead of the journal then."""
        if self._ledger.stuck:
            raise StorageFailed(self.problem)
        return self._ledger.committed

    def cluster_events(self, after: int) -> Sequence[Numbered]:
        """Return the cluster's newest events behind the number `after`, as far as they are on
        disk."""
        return self.archive.cluster.read(after, self._ledger.committed)

    def watch(self, note: Callable[[ClusterState, Event], None]) -> None:
        """Call `note` with each event before it changes the state."""
        self._ledger.watch = note

    def close(self) -> None:
        self._inbox.close()

    async def run(self) -> None:
        """Run until cancelled, or until an invariant is broken."""
        looked_at, late_s = self.now(), 0.0
        while True:
            await self._iterate(looked_at, late_s)
            took_s = self.now() - looked_at
            self.vitals.iterations.add(took_s)
            await self._rest(took_s)
            wake_at = looked_at + _TICK_S
            for at in (self._wake_at, self.sessions.acknowledges_at):
                wake_at = wake_at if at is None else min(wake_at, at)
            await self._inbox.wait(wake_at - self.now())
            before, looked_at = looked_at, self.now()
            late_s = looked_at - before - _TICK_S

    async def _rest(self, took_s: float) -> None:
        """Let the other tasks of the event loop run between two iterations."""
        if self._inbox.waiting:
            await asyncio.sleep(0)
        elif took_s > _SHORT_ITERATION_S:
            await asyncio.sleep(min(_REST_FACTOR * took_s, _LONGEST_REST_S))

    async def _iterate(self, now: float, late_s: float) -> None:
        """Run one iteration. `now`: its start, also for a pause during it, which the next iteration
        notices. `late_s`: its delay."""
        ledger = self._ledger
        self._inbox.handle(most=None if self._is_late(late_s) else _MOST_HANDLED)
        # After handling messages stamped before a pause, and before deciding anything.
        self._excuse(now, late_s)
        if self.archive.storage.look(self.now()):
            ledger.dirty = True
            self.sessions.ask_again()
        self.sessions.pass_over_lost(now, late_s)
        if ledger.dirty or self._wake_at is None or now >= self._wake_at:
            self._decide(now)
        changed, ledger.dirty = ledger.dirty, False
        if changed:
            process.reach("applied")
            await self._store()
            process.reach("committed")
            self.sessions.brief()
            process.reach("told")
        self.archive.write()
        if changed:
            ledger.compact()
            self.changes.happened()
        self.sessions.acknowledge()
        self._inbox.answer_all()

    async def _store(self) -> None:
        """Commit the journal. While it cannot be written, nothing is sent; the master then counts
        as late, so that no node's lease expires."""
        while not self._ledger.commit():
            if not self.archive.storage.give_way():
                self._ledger.stuck = True
                self._inbox.refuse(StorageFailed(f"{self.problem}; {_MAY_BE_DONE}"))
                self.changes.happened()
                await asyncio.sleep(_STUCK_S)
        self._ledger.stuck = False

    def _excuse(self, now: float, late_s: float) -> None:
        """Extend leases by `late_s` where the loop itself was late: it had no processor then, so
        silence proves nothing."""
        timing = self.config.timing
        if self._is_late(late_s):
            log.warning("the master was late; leases last as much longer", extra={"late_s": late_s})
            self.vitals.late_times += 1
            self.vitals.late_s += late_s
            cut = late_s >= timing.ping_timeout_s
            self._ledger.observe(Tick(late_s=late_s, cut=cut), now)

    def _is_late(self, late_s: float) -> bool:
        return late_s > self.config.timing.lag_limit_s

    def _decide(self, now: float) -> None:
        decision = Decision()
        for _ in range(_MOST_DECISIONS):
            decision = self._reconcile(now)
            self._wake_at = decision.wake_at
            if not decision.actions:
                self._planner.want(decision.awaits)
                if decision.awaits is None:
                    self._planner.foresee(self._foresight.look(self._context(now)))
                if self.state.job is not None:
                    self._planner.prepare()
                    self._tell_idle(self.state.job, decision.why_idle, now)
                if decision.reason != self._reason:
                    log.info("nothing to do", extra={"reason": decision.reason or "all is well"})
                    self._reason = decision.reason
                return
            for event in decision.actions:
                self._ledger.journal(event)
        raise RuntimeError(f"decisions do not end; the last: {decision.reason}")

    def _tell_idle(self, job: Job, why: str, now: float) -> None:
        if why != job.seen.why_idle:
            self._ledger.observe(NodesIdle(job_id=job.id, why=why), now)

    def _planned(self) -> None:
        """Wake the loop: the planner may have the awaited reply."""

        def handle(arrived_at: float) -> None:
            self._wake_at = arrived_at

        self._inbox.post(handle)

    def _context(self, now: float) -> Context:
        return Context(
            state=self.state, now=now, timing=self.config.timing, nonce="", planner=self._planner
        )

    def _reconcile(self, now: float) -> Decision:
        nonce = self._environment.token(16)
        try:
            return reconcile(
                self.state,
                now,
                self.config.timing,
                nonce=nonce,
                planner=self._planner,
                retain=self.config.retention,
                gives_way_s=self.config.gives_way_s,
            )
        except Exception as error:
            # An internal error in planning one job must not end the master.
            job = self.state.job
            if job is None:
                raise
            log.exception("planning failed", extra={"job": job.id})
            failed = JobFailed(job_id=job.id, reason=f"internal error while planning: {error!r}")
            return Decision(actions=(failed,), reason=failed.reason)

"""The thin shell around the agent's state: events in, decisions carried out.

Everything happens in the event loop without waiting: an event is applied, the decision's actions
are done at once, and what they did is applied too, until nothing is left to do. Owns the
processes and tells the outbox; must not know streams.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

from oobleck.agent.actions import (
    Action,
    AskStacks,
    AskWorker,
    End,
    ForkWorker,
    GiveUpWorker,
    KillWarm,
    KillWorker,
    SendMeasure,
    SendPlan,
    SendSave,
    StartWarm,
    StopWorker,
)
from oobleck.agent.config import AgentConfig
from oobleck.agent.desired import Desired
from oobleck.agent.events import (
    Asked,
    Assigned,
    ChannelClosed,
    DetectionTold,
    Event,
    ForkAsked,
    Leave,
    MeasureSent,
    Paused,
    PlanSent,
    SaveSent,
    ShutDown,
    StacksAsked,
    StopSent,
    WarmExited,
    WarmKilled,
    WarmReady,
    WarmStarted,
    WorkerExited,
    WorkerForked,
    WorkerKilled,
    WorkerSaid,
)
from oobleck.agent.memory import kernel_kills
from oobleck.agent.outbox import Outbox
from oobleck.agent.processes import Listener, WarmProcess, WorkerProcess
from oobleck.agent.reconcile import decide
from oobleck.agent.state import NodeState
from oobleck.agent.worker import Worker
from oobleck.host.detection import Detection
from oobleck.host.messages import (
    Alive,
    Ask,
    Assign,
    CheckpointSaved,
    Committed,
    Evaluated,
    Failed,
    Finished,
    Fork,
    FromWorker,
    Launch,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Ready,
    Record,
    Recorded,
    Restored,
    Save,
    SaveFailed,
    Stop,
)
from oobleck.host.process import signal_name
from oobleck.host.surroundings import Surroundings
from oobleck.planner.ids import Generation, Incarnation, JobId, WorkerId
from oobleck.proto import types

logger = logging.getLogger(__name__)

#: A channel whose worker is dead closes at once, unless a child of the worker holds it open.
LAST_WORDS_S = 0.2


def new_incarnation(surroundings: Surroundings) -> Incarnation:
    return Incarnation(surroundings.token(8))


def _how(returncode: int | None) -> str:
    if returncode is None:
        return "could not be started"
    return f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"exit {returncode}"


class Supervisor:
    """Keeps the processes of one node as the master wants them."""

    def __init__(
        self,
        config: AgentConfig,
        outbox: Outbox,
        surroundings: Surroundings,
        *,
        start_warm: Callable[[Listener], WarmProcess] = WarmProcess,
        start_worker: Callable[[int, Incarnation, Listener], WorkerProcess] = WorkerProcess,
    ) -> None:
        """`start_warm`, `start_worker`: what stands for the processes here."""
        self._config = config
        self._outbox = outbox
        self._surroundings = surroundings
        self._now = surroundings.now
        self._start_warm = start_warm
        self._start_worker = start_worker
        self._address = ""
        self._state = NodeState(
            node=config.name, slot_count=config.worker_slots, faults=config.faults
        )
        self._warm: WarmProcess | None = None
        self._kernel_kills = kernel_kills()
        self._processes: dict[Incarnation, WorkerProcess] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: When it is to look again.
        self._wake_at: float | None = None
        self._done = asyncio.Event()

    async def run(self) -> None:
        """Until a shutdown has ended every process."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._settle()
                await self._done.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for process in self._processes.values():
                process.kill()
            if self._warm is not None:
                self._warm.kill()

    # ---- from the session

    def reached_from(self, address: str) -> None:
        """The address that this node's workers are reached by."""
        self._address = address

    def detect(self, detection: Detection) -> None:
        """What the master goes by."""
        self._handle(DetectionTold(detection=detection))

    def assigned(self, desired: Desired | None, drained: bool) -> None:
        if desired != self._state.desired:
            generation = desired.part.plan.generation if desired and desired.part else None
            job_id = desired.job_id if desired else None
            logger.info("assigned", extra={"job": job_id, "generation": generation})
        self._handle(Assigned(desired=desired, drained=drained))

    def record(self, job_id: JobId, wish: Record) -> None:
        """Have the workers of that job record; what they do not hear of is asked for again."""
        for incarnation, worker in self._state.workers.items():
            if worker.job_id == job_id and incarnation in self._processes:
                self._processes[incarnation].send(wish)

    def leave(self) -> None:
        """End once the node is drained; told again, at once."""
        if self._state.leave_by is not None:
            return self.shut_down()
        logger.info("told to end; the work is to move off first")
        return self._handle(Leave(grace_s=self._config.drain_grace_s))

    def shut_down(self) -> None:
        if not self._state.shutting_down:
            logger.info("ending")
        self._handle(ShutDown())

    def standing_reports(self) -> list[types.WorkerReport]:
        """What a new session must hear again: failures (also why a slot stays empty), losses and
        measurements not yet answered by a plan, and the last words on checkpoints and
        evaluations."""
        ended = [
            slot.failed
            for slot in self._state.slots
            if slot.failed is not None and slot.failed.incarnation not in self._state.workers
        ]
        return [
            self._report(worker, what)
            for worker in (*ended, *self._state.workers.values())
            for what in (
                worker.failure,
                worker.hung,
                worker.peer_lost,
                *worker.measured,
                *worker.checkpoints,
                *worker.evaluated,
            )
            if what is not None
        ]

    # ---- from the processes (a `Listener`)

    def warm_ready(self) -> None:
        self._handle(WarmReady())

    def warm_exited(self, returncode: int | None, last_line: str) -> None:
        # The kernel kills the workers with the warm process, and nobody is left to tell how.
        self._warm = None
        for process in list(self._processes.values()):
            process.kill()
            self._bury(process, None, signal.SIGKILL)
        if not self._state.shutting_down:
            logger.warning("warm process ended", extra={"returncode": returncode})
        how = _how(returncode) + (f": {last_line}" if last_line else "")
        self._handle(WarmExited(how=how))

    def forked(self, incarnation: Incarnation, pid: int) -> None:
        if (process := self._processes.get(incarnation)) is not None:
            process.forked(pid)
            self._handle(WorkerForked(incarnation=incarnation, pid=pid))

    def fork_failed(self, incarnation: Incarnation, reason: str) -> None:
        """No process came of it, so no exit is reported; the slot's budget spaces the retries."""
        process = self._processes.get(incarnation)
        if process is None or process.buried:
            return
        process.buried = True
        process.gone()
        del self._processes[incarnation]
        self._handle(WorkerExited(incarnation=incarnation))
        wait_s = max(0.0, self._state.slots[process.slot].budget.not_before - self._now())
        extra = {"slot": process.slot, "reason": reason, "next_start_in_s": round(wait_s, 1)}
        logger.warning("fork failed", extra=extra)

    def said(self, incarnation: Incarnation, message: FromWorker) -> None:
        worker = self._state.workers.get(incarnation)
        if worker is None:
            return
        match message:
            case Committed(record=record):
                self._outbox.record(worker.job_id, record, self._now())
            case (
                PhaseReached()
                | PeerLost()
                | Measured()
                | LinkMeasured()
                | CheckpointSaved()
                | SaveFailed()
                | Restored()
                | Evaluated()
            ):
                self._outbox.report(self._report(worker, message))
            case Failed():
                fields = {"slot": worker.slot, "kind": message.kind, "reason": message.message}
                logger.error("worker failed", extra=fields)
                self._outbox.report(self._report(worker, message))
            case Recorded(recording=recording):
                self._outbox.recorded(worker.job_id, worker.slot, recording)
            case Ready() | Alive() | Finished():
                pass  # in the status
        self._handle(WorkerSaid(incarnation=incarnation, message=message))

    def printed(self, incarnation: Incarnation, lines: list[str]) -> None:
        if (worker := self._state.workers.get(incarnation)) is not None:
            self._outbox.log(worker.job_id, worker.slot, lines)

    def channel_closed(self, incarnation: Incarnation) -> None:
        self._handle(ChannelClosed(incarnation=incarnation))

    def child_exited(self, pid: int, exit_code: int | None, signum: int | None) -> None:
        process = next((p for p in self._processes.values() if p.pid == pid), None)
        if process is not None:
            self._bury(process, exit_code, signum)

    def _bury(self, process: WorkerProcess, exit_code: int | None, signum: int | None) -> None:
        if not process.buried:
            process.buried = True
            self._tasks.create_task(self._gone(process, exit_code, signum))

    async def _gone(
        self, process: WorkerProcess, exit_code: int | None, signum: int | None
    ) -> None:
        """The process has ended; hear what it last said, then report it and forget it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await process.silent.wait()
        process.gone()
        del self._processes[process.incarnation]
        worker = self._state.workers[process.incarnation]
        how = f"killed by {signal_name(signum)}" if signum else f"exit code {exit_code}"
        fields = {"slot": worker.slot, "pid": process.pid, "how": how}
        expected = worker.stop_sent_at is not None
        logger.log(logging.INFO if expected else logging.WARNING, "worker ended", extra=fields)
        exited = types.WorkerExited(
            pid=process.pid or 0,
            exit_code=exit_code,
            signal=signum,
            log_tail=process.tail.last_lines(),
            out_of_memory=signum == signal.SIGKILL and self._memory_ran_out(),
        )
        self._outbox.report(self._report(worker, exited))
        self._handle(WorkerExited(incarnation=worker.incarnation))
        wait_s = self._state.slots[worker.slot].budget.not_before - self._now()
        if wait_s > 0 and self._state.desired is not None:
            extra = {"slot": worker.slot, "next_start_in_s": round(wait_s, 1)}
            logger.warning("worker keeps ending, waiting before the next start", extra=extra)

    def _memory_ran_out(self) -> bool:
        """Whether the kernel has ended a process for want of memory since this was asked last."""
        before, self._kernel_kills = self._kernel_kills, kernel_kills()
        return self._kernel_kills > before

    def _report(
        self,
        worker: Worker,
        what: types.Happening,
    ) -> types.WorkerReport:
        generation = worker.sent
        if isinstance(what, PhaseReached | PeerLost | Restored):
            generation = what.generation
        if isinstance(what, Evaluated):
            generation = what.record.generation
        return types.WorkerReport(
            job_id=worker.job_id,
            slot=worker.slot,
            incarnation=worker.incarnation,
            generation=generation,
            what=what,
        )

    # ---- deciding and acting

    def _handle(self, event: Event) -> None:
        self._state.apply(event, self._now())
        self._settle()

    def _settle(self) -> None:
        """Act until the decision is to wait."""
        late_s = 0.0 if self._wake_at is None else self._now() - self._wake_at
        if late_s > self._state.detection.lag_limit_s:
            logger.warning("the agent was late", extra={"late_s": round(late_s, 1)})
            self._state.apply(Paused(seconds=late_s), self._now())
        while True:
            decision = decide(self._state, self._now())
            if not decision.actions:
                break
            for action in decision.actions:
                self._state.apply(self._perform(action), self._now())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = decision.wake_at
        if decision.wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, decision.wake_at - self._now()) + 0.001, self._settle
            )
        self._outbox.status(self._status(), has_rank_0=self._has_rank_0())
        if decision.done:
            self._done.set()

    def _perform(self, action: Action) -> Event:
        """Do it; the event that tells that it is done."""
        match action:
            case StartWarm():
                self._warm = self._start_warm(self)
                run = self._warm.run(self._config.warm_command, self._config.environment)
                self._tasks.create_task(run)
                return WarmStarted()
            case KillWarm(reason=reason):
                logger.info("killing the warm process", extra={"reason": reason})
                assert self._warm is not None
                self._warm.kill()
                return WarmKilled()
            case ForkWorker(slot=slot, desired=desired):
                return self._fork(slot, desired)
            case SendPlan(incarnation=incarnation, part=part):
                assign = Assign(
                    plan=part.plan,
                    rendezvous=part.rendezvous,
                    boundary=part.boundary,
                    restore=part.restore,
                    leaving=part.leaving,
                    handover=part.handover,
                )
                self._processes[incarnation].send(assign)
                return PlanSent(
                    incarnation=incarnation,
                    generation=part.plan.generation,
                    boundary=part.boundary,
                )
            case SendMeasure(incarnation=incarnation, wish=wish):
                self._processes[incarnation].send(wish)
                return MeasureSent(incarnation=incarnation, attempt=wish.attempt)
            case SendSave(incarnation=incarnation, number=number):
                self._processes[incarnation].send(Save(number=number))
                return SaveSent(incarnation=incarnation, number=number)
            case AskWorker(incarnation=incarnation, look=look):
                process = self._processes[incarnation]
                process.send(Ask())
                return Asked(incarnation=incarnation, kernel=process.kernel() if look else "")
            case AskStacks(incarnation=incarnation, since=since):
                self._processes[incarnation].tell_stacks()
                return StacksAsked(incarnation=incarnation, since=since)
            case GiveUpWorker(incarnation=incarnation, since=since, reason=reason):
                return self._give_up(incarnation, self._now() - since, reason)
            case StopWorker(incarnation=incarnation, reason=reason):
                self._processes[incarnation].send(Stop(reason=reason))
                return StopSent(incarnation=incarnation)
            case KillWorker(incarnation=incarnation, reason=reason):
                process = self._processes[incarnation]
                fields = {"slot": process.slot, "pid": process.pid, "reason": reason}
                logger.warning("killing a worker", extra=fields)
                process.kill()
                return WorkerKilled(incarnation=incarnation)
            case End(reason=reason):
                logger.info("ending", extra={"reason": reason})
                return ShutDown()

    def _give_up(self, incarnation: Incarnation, seconds: float, reason: str) -> Event:
        """Tell at once: what hangs in the kernel does not end when it is killed."""
        process = self._processes[incarnation]
        fields = {"slot": process.slot, "pid": process.pid, "reason": reason}
        logger.warning("killing a worker that hangs", extra=fields)
        hung = types.Hung(reason=reason, seconds=seconds)
        self._outbox.report(self._report(self._state.workers[incarnation], hung))
        process.kill()
        return WorkerKilled(incarnation=incarnation, hung=hung)

    def _fork(self, slot: int, desired: Desired) -> Event:
        assert self._warm is not None
        process = self._start_worker(slot, new_incarnation(self._surroundings), self)
        self._processes[process.incarnation] = process
        kind = desired.job.model.kind
        self._warm.fork(Fork(slot=slot, incarnation=process.incarnation, kind=kind), process)
        launch = Launch(
            worker=WorkerId(self._config.name, slot),
            job_id=desired.job_id,
            job=desired.job,
            address=self._address,
            agent_pid=os.getpid(),
            device_kind=self._config.device_kind,
            device=self._config.device_of(slot),
            faults=self._state.faults_for(slot),
        )
        self._tasks.create_task(process.serve(launch))
        return ForkAsked(slot=slot, incarnation=process.incarnation)

    # ---- what the master is told

    def _status(self) -> types.NodeStatus:
        desired = self._state.desired
        leaving = self._state.leave_by is not None
        trouble, failed_starts = self._state.trouble(), self._state.warm.failed_starts
        if desired is None:
            return types.NodeStatus(leaving=leaving, trouble=trouble, failed_starts=failed_starts)
        return types.NodeStatus(
            leaving=leaving,
            trouble=trouble,
            failed_starts=failed_starts,
            job_id=desired.job_id,
            generation=desired.part.plan.generation if desired.part else Generation(0),
            workers=tuple(
                types.WorkerStatus(
                    slot=worker.slot,
                    incarnation=worker.incarnation,
                    pid=worker.pid or 0,
                    store=worker.store,
                    data=worker.data,
                    generation=worker.entered,
                    committed_step=-1 if worker.committed_step is None else worker.committed_step,
                    finished=worker.finished,
                    peak_memory_bytes=worker.memory.peak_bytes if worker.memory else 0,
                    base_memory_bytes=worker.memory.base_bytes if worker.memory else 0,
                    beats=worker.alive.beats if worker.alive else 0,
                    doing=worker.alive.doing if worker.alive else "",
                    waiting=worker.alive is not None and worker.alive.waiting,
                )
                for worker in self._state.serving()
            ),
        )

    def _has_rank_0(self) -> bool:
        part = self._state.desired.part if self._state.desired else None
        return part is not None and part.plan.workers[0].node == self._config.name

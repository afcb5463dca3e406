"""Thin shell around the agent's state: events in, decisions carried out.

Everything happens in the event loop without waiting. An event is applied, the decision's actions
are done at once, and their effects are applied too, until nothing is left to do. Receives the
events of its pool's processes and fills the outbox; must not know streams.
"""

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from oobleck.agent import events, metrics
from oobleck.agent.config import AgentConfig
from oobleck.agent.connection.outbox import HOLD_S, Outbox
from oobleck.agent.connection.reports import records_hold_s, report_of, standing_reports, status_of
from oobleck.agent.gpus import GpuHealth
from oobleck.agent.processes.children import ExitStatus, WarmProcess, WorkerProcess
from oobleck.agent.processes.pool import ProcessPool, StartWarmProcess, StartWorker
from oobleck.agent.reconcile import decide
from oobleck.agent.state import NodeState
from oobleck.agent.wheels import WheelCache
from oobleck.core.ids import Incarnation, JobId, WorkerId
from oobleck.core.messages import (
    Acknowledged,
    Alive,
    Assign,
    Committed,
    Failed,
    Finished,
    FromWorker,
    Handed,
    Ready,
    Record,
    Recorded,
)
from oobleck.host.detection import Detection
from oobleck.host.gpu.sample import Sample
from oobleck.host.ipc.marker import with_last_line
from oobleck.host.metrics import Reading
from oobleck.host.system.environment import Environment
from oobleck.host.system.memory import kernel_kills
from oobleck.host.system.process import signal_name
from oobleck.proto import types

logger = logging.getLogger(__name__)

#: Longest wait for a dead worker's channel to close, which children of the worker may hold open.
CLOSE_S = 0.2
#: The same for an exiting worker. Its channel stays open until its memory is freed, but has all
#: messages already.
EXITING_CLOSE_S = 0.01


def _described_end(returncode: int | None) -> str:
    if returncode is None:
        return "could not be started"
    return f"was killed by {signal_name(-returncode)}" if returncode < 0 else f"exit {returncode}"


class Supervisor:
    """Supervisor of one node's processes, which keeps them as the master wants them."""

    def __init__(
        self,
        config: AgentConfig,
        outbox: Outbox,
        environment: Environment,
        *,
        start_warm: StartWarmProcess = WarmProcess,
        start_worker: StartWorker = WorkerProcess,
        wheels: WheelCache | None = None,
    ) -> None:
        """Take the dependencies of a node's supervisor. `start_warm` and `start_worker` start its
        processes. `wheels` holds those that jobs bring; None: this node takes none."""
        self._config = config
        #: Queue of all messages to the master.
        self._outbox = outbox
        #: How long records are held back, cached, and the plan that this follows from.
        self._held_for: Assign | None = None
        self._hold_s = HOLD_S
        self._now = environment.now
        self._pool = ProcessPool(
            config,
            environment,
            self,
            start_warm=start_warm,
            start_worker=start_worker,
            wheels=wheels or WheelCache(None),
        )
        self._state = NodeState(
            node=config.name,
            slot_count=config.worker_slots,
            faults=config.faults,
            health=GpuHealth(places=[gpu.bus for gpu in config.gpus]),
        )
        #: Number of processes that the kernel had killed for lack of memory at the last look.
        self._kernel_kills = kernel_kills()
        #: Time to look again though nothing happens, and the timer for it; None: none is set.
        self._wake_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Set once every process has ended.
        self._done = asyncio.Event()
        #: True once `_done` was set or `run` cancelled: nothing is started any more.
        self._is_over = False

    async def run(self) -> None:
        """Run until a shutdown has ended every process."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    self._settle()
                    await self._done.wait()
                finally:
                    self._is_over = True
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._pool.kill_all()

    @property
    def is_ready(self) -> bool:
        """True if a session with a master is open and the agent was not told to end."""
        state = self._state
        return state.no_session_since is None and state.leave_at is None and not state.shutting_down

    def metrics(self) -> Iterator[Reading]:
        """Read the metrics of this agent, its workers and their GPUs."""
        yield from metrics.read_workers(
            self._state, self._config.name, self._config.versions.oobleck
        )
        yield from metrics.read_gpus(self._state.health)

    # ---- from the session

    def reached_from(self, address: str) -> None:
        """Note the address by which others reach this node's workers."""
        self._pool.address = address

    def session_open(self, is_open: bool) -> None:
        """Note whether a session with a master is open."""
        self._handle(events.SessionBegan() if is_open else events.SessionOver())

    def detect(self, detection: Detection) -> None:
        """Adopt the master's time-outs."""
        self._handle(events.DetectionReceived(detection=detection))

    def assigned(self, desired: types.Assignment) -> None:
        """Handle an assignment from the master."""
        if desired != msgspec.structs.replace(self._state.desired, version=desired.version):
            fields = {"job": desired.job_id, "generation": desired.generation or None}
            logger.info("assigned", extra=fields)
        self._handle(events.Assigned(desired=desired))

    def not_understood(self, reason: str) -> None:
        """Handle an assignment that cannot be read."""
        logger.error("assignment not understood", extra={"reason": reason})
        self._handle(events.NotUnderstood(reason=reason))

    def record(self, job_id: JobId, wish: Record) -> None:
        """Have the workers of that job record; the master asks again for what does not arrive."""
        for incarnation, worker in self._state.workers.items():
            if worker.job_id == job_id and incarnation in self._pool.processes:
                self._pool.processes[incarnation].send(wish)

    @property
    def has_workers(self) -> bool:
        """True if there is a worker process here."""
        return bool(self._state.workers)

    def return_code(self, digest: str) -> None:
        """Give the wheel of a job here back to the master."""
        self._tasks.create_task(self._pool.wheels.give_back(digest))

    def acknowledged(self, job_id: JobId, step: int, evaluation: int) -> None:
        """Note which of the job's records the master has on its disk."""
        acknowledged = Acknowledged(step=step, evaluation=evaluation)
        self._handle(events.RecordsStored(job_id=job_id, acknowledged=acknowledged))

    def leave(self) -> None:
        """End once the node is drained; at a second call, at once."""
        if self._state.leave_by is not None:
            return self.shut_down()
        logger.info("ending once the node is drained")
        return self._handle(events.Leave(grace_s=self._config.drain_grace_s))

    def shut_down(self) -> None:
        """End at once: stop all workers."""
        if not self._state.shutting_down:
            logger.info("ending")
        self._handle(events.ShutDown())

    def standing_reports(self) -> list[types.WorkerReport]:
        """Return the reports to repeat in a new session."""
        return standing_reports(self._state)

    def gpus_read(self, sample: Sample) -> None:
        """Handle a sample of this host's GPUs, and log a change of their health."""
        before = self._state.health.summary()
        self._handle(events.GpusRead(sample=sample))
        if (after := self._state.health.summary()) != before:
            sick, concern = after
            fields = {"sick": sick or None, "concern": concern or None}
            logger.log(logging.ERROR if sick else logging.WARNING, "health of GPUs", extra=fields)

    # ---- from the processes (a `Listener`)

    def warm_ready(self) -> None:
        self._handle(events.WarmReady())

    def warm_exited(self, returncode: int | None, last_line: str) -> None:
        # The kernel kills the workers with the warm process, which alone could report their exits.
        self._pool.warm_has_ended()
        for process in list(self._pool.processes.values()):
            process.kill()
            self._bury(process, None, signal.SIGKILL, wait_s=CLOSE_S)
        if not self._state.shutting_down:
            logger.warning("warm process ended", extra={"returncode": returncode})
        how = _described_end(returncode) + (f": {last_line}" if last_line else "")
        self._handle(events.WarmExited(how=how))

    def forked(self, incarnation: Incarnation, pid: int) -> None:
        if (process := self._pool.processes.get(incarnation)) is not None:
            process.forked(pid)
            self._handle(events.WorkerForked(incarnation=incarnation, pid=pid))

    def fork_failed(self, incarnation: Incarnation, reason: str) -> None:
        """Handle a failed fork, after which no exit follows. The slot's budget delays retries."""
        process = self._pool.processes.get(incarnation)
        if process is None or process.buried:
            return
        process.buried = True
        process.release()
        del self._pool.processes[incarnation]
        self._handle(events.WorkerExited(incarnation=incarnation))
        wait_s = max(0.0, self._state.slots[process.slot].budget.not_before - self._now())
        extra = {"worker": process.worker, "reason": reason, "next_start_in_s": round(wait_s, 1)}
        logger.warning("fork failed", extra=extra)

    def received(self, incarnation: Incarnation, message: FromWorker) -> None:
        worker = self._state.workers.get(incarnation)
        if worker is None:
            return
        match message:
            case Committed(record=record, compute=compute):
                is_first = worker.compute is not None or worker.stepped < record.generation
                if compute is not None and not compute.makes_sense and is_first:
                    reported = f"{compute.seconds} s in {compute.steps} steps"
                    extra = {"worker": self._name(worker.slot), "reported": reported}
                    logger.error("implausible compute time of a worker ignored", extra=extra)
                self._outbox.record(worker.job_id, record, self._now())
            case Handed(generation=generation, records=records):
                self._outbox.restored(worker.job_id, records, generation, self._now())
            case Recorded(recording=recording):
                self._outbox.recorded(worker.job_id, worker.slot, recording)
            case Ready() | Alive() | Finished():
                pass  # the node's status has it
            case _:
                if isinstance(message, Failed):
                    name = self._name(worker.slot)
                    fields = {"worker": name, "kind": message.kind, "reason": message.message}
                    logger.error("worker failed", extra=fields)
                self._outbox.report(report_of(worker, message), self._now())
        self._handle(events.WorkerMessage(incarnation=incarnation, message=message))

    def printed(self, incarnation: Incarnation, lines: list[str]) -> None:
        if (worker := self._state.workers.get(incarnation)) is not None:
            self._outbox.log(worker.job_id, worker.slot, lines, self._now())

    def code_fetched(self, incarnation: Incarnation) -> None:
        self._handle(events.CodeFetched(incarnation=incarnation))

    def channel_closed(self, incarnation: Incarnation) -> None:
        self._handle(events.ChannelClosed(incarnation=incarnation))

    def ending(self, incarnation: Incarnation, status: ExitStatus) -> None:
        process = self._pool.processes.get(incarnation)
        if process is not None and not process.buried:
            process.kill()  # it may only look so, because its first thread has ended
            self._pool.is_ending(process)
            self._bury(process, *status, wait_s=EXITING_CLOSE_S)

    def child_exited(self, pid: int, exit_code: int | None, signum: int | None) -> None:
        self._pool.has_ended(pid)
        process = self._pool.of_pid(pid)
        if process is not None:
            self._bury(process, exit_code, signum, wait_s=CLOSE_S)

    def _bury(
        self, process: WorkerProcess, exit_code: int | None, signum: int | None, *, wait_s: float
    ) -> None:
        if not process.buried:
            process.buried = True
            self._tasks.create_task(self._report_end(process, exit_code, signum, wait_s))

    async def _report_end(
        self, process: WorkerProcess, exit_code: int | None, signum: int | None, wait_s: float
    ) -> None:
        """Handle the last messages of a worker that ends, then report its end and forget it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await process.silent.wait()
        verdict = process.marker.verdict(exit_code)
        process.release()
        del self._pool.processes[process.incarnation]
        worker = self._state.workers[process.incarnation]
        if verdict and worker.failure is None and worker.stop_sent_at is None:
            # The user's code ended the process before it could report.
            message = with_last_line(verdict, process.tail.last_line())
            self.received(worker.incarnation, Failed(kind="user", message=message))
        how = f"killed by {signal_name(signum)}" if signum else f"exit code {exit_code}"
        fields = {"worker": process.worker, "pid": process.pid, "how": how}
        expected = worker.stop_sent_at is not None
        logger.log(logging.INFO if expected else logging.WARNING, "worker ended", extra=fields)
        exited = types.WorkerExited(
            pid=process.pid or 0,
            exit_code=exit_code,
            signal=signum,
            log_tail=process.tail.last_lines(),
            out_of_memory=signum == signal.SIGKILL and self._memory_ran_out(),
        )
        self._outbox.report(report_of(worker, exited), self._now())
        self._outbox.hurry(self._now())
        self._handle(events.WorkerExited(incarnation=worker.incarnation, end=exited))
        wait_s = self._state.slots[worker.slot].budget.not_before - self._now()
        if wait_s > 0 and self._state.desired.job_id is not None:
            extra = {"worker": process.worker, "next_start_in_s": round(wait_s, 1)}
            logger.warning("worker keeps ending, waiting before the next start", extra=extra)

    def _name(self, slot: int) -> WorkerId:
        return WorkerId(self._config.name, slot)

    def _memory_ran_out(self) -> bool:
        """Return whether the kernel has killed a process for lack of memory since the last call."""
        before, self._kernel_kills = self._kernel_kills, kernel_kills()
        return self._kernel_kills > before

    # ---- deciding and acting

    def _handle(self, event: events.Event) -> None:
        self._state.apply(event, self._now())
        self._settle()

    def _settle(self) -> None:
        """Act until the decision is to wait. Do nothing for events that arrive while `run`
        ends."""
        if self._is_over:
            return
        late_s = 0.0 if self._wake_at is None else self._now() - self._wake_at
        if late_s > self._state.detection.lag_limit_s:
            logger.warning("the agent was late", extra={"late_s": round(late_s, 1)})
            self._state.apply(events.Paused(seconds=late_s), self._now())
        while True:
            agenda = decide(self._state, self._now())
            if not agenda.actions:
                break
            for action in agenda.actions:
                self._do(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake_at = agenda.wake_at
        if agenda.wake_at is not None:
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, agenda.wake_at - self._now()) + 0.001, self._settle
            )
        assign = self._state.desired.assign
        if assign is not self._held_for:
            self._held_for, self._hold_s = assign, records_hold_s(self._state)
        self._outbox.status(status_of(self._state), self._now(), hold_s=self._hold_s)
        if agenda.done:
            self._done.set()

    def _do(self, action: events.Action) -> None:
        self._state.apply(self._pool.perform(action, self._tasks), self._now())
        if isinstance(action, events.GiveUpWorker):
            # Report it now: a process that hangs in the kernel does not end when it is killed.
            worker = self._state.workers[action.incarnation]
            assert worker.hung is not None
            self._outbox.report(report_of(worker, worker.hung), self._now())

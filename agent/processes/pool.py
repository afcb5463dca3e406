"""Processes of one node, and how an action is performed on them.

Decides nothing. Every action is performed at once. Must not know the master.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from oobleck.agent import events
from oobleck.agent.config import AgentConfig
from oobleck.agent.processes.children import Listener, WarmProcess, WorkerProcess
from oobleck.agent.wheels import WheelCache
from oobleck.core.ids import Incarnation, WorkerId
from oobleck.core.messages import Ask, Fork, Launch
from oobleck.host.system.environment import Environment

logger = logging.getLogger(__name__)

#: Longest wait for a driver to free a killed process's GPU memory, which takes seconds.
FREED_S = 10.0

StartWarmProcess = Callable[[Listener], WarmProcess]
StartWorker = Callable[[WorkerId, Incarnation, Listener], WorkerProcess]


def new_incarnation(environment: Environment) -> Incarnation:
    """Return an id that was never used before."""
    return Incarnation(environment.token(8))


class ProcessPool:
    """Warm process of a node, and the workers that were forked from it."""

    def __init__(
        self,
        config: AgentConfig,
        environment: Environment,
        listener: Listener,
        *,
        start_warm: StartWarmProcess,
        start_worker: StartWorker,
        wheels: WheelCache,
    ) -> None:
        #: None: it has ended, or was never started.
        self.warm: WarmProcess | None = None
        #: The workers' processes, until their ends have been reported.
        self.processes: dict[Incarnation, WorkerProcess] = {}
        #: By slot, a process that is exiting while its memory is still being freed: its pid, and an
        #: event that is set once the memory is free.
        self._freeing: dict[int, tuple[int | None, asyncio.Event]] = {}
        #: The address that this node's workers are reached by.
        self.address = ""
        self._config = config
        self._environment = environment
        self._listener = listener
        self.wheels = wheels
        #: Factories of the processes; simulations pass their own.
        self._start_warm = start_warm
        self._start_worker = start_worker

    def of_pid(self, pid: int) -> WorkerProcess | None:
        return next((p for p in self.processes.values() if p.pid == pid), None)

    def is_ending(self, process: WorkerProcess) -> None:
        """Note that the process ends, while its memory is still being freed."""
        self._freeing[process.slot] = process.pid, asyncio.Event()

    def has_ended(self, pid: int) -> None:
        for slot, (ending, freed) in list(self._freeing.items()):
            if ending == pid:
                freed.set()
                del self._freeing[slot]

    def warm_has_ended(self) -> None:
        """Stop waiting for memory to be freed: no process is left to report exits."""
        self.warm = None
        for _, freed in self._freeing.values():
            freed.set()
        self._freeing.clear()

    def kill_all(self) -> None:
        """Kill all processes by SIGKILL, without waiting for their ends."""
        for process in self.processes.values():
            process.kill()
        if self.warm is not None:
            self.warm.kill()

    def perform(self, action: events.Action, tasks: asyncio.TaskGroup) -> events.Event:
        """Execute the action and return its event. Longer work runs in `tasks`."""
        match action:
            case events.StartWarm():
                self.warm = self._start_warm(self._listener)
                run = self.warm.run(self._config.warm_command, self._config.environment)
                tasks.create_task(run)
            case events.KillWarm(reason=reason):
                logger.info("killing the warm process", extra={"reason": reason})
                assert self.warm is not None
                self.warm.kill()
            case events.ForkWorker():
                return self._fork(action, tasks)
            case events.Send(incarnation=incarnation, message=message):
                self.processes[incarnation].send(message)
            case events.RequestHeartbeat(incarnation=incarnation, look=look):
                process = self.processes[incarnation]
                process.send(Ask())
                kernel = process.kernel_state() if look else ""
                return events.HeartbeatRequested(incarnation=incarnation, kernel=kernel)
            case events.WriteStacks(incarnation=incarnation):
                self.processes[incarnation].write_stacks()
            case events.GiveUpWorker(incarnation=incarnation, reason=reason):
                self._kill(incarnation, "killing a worker that hangs", reason)
            case events.KillWorker(incarnation=incarnation, reason=reason):
                self._kill(incarnation, "killing a worker", reason)
            case events.End(reason=reason):
                logger.info("ending", extra={"reason": reason})
                return events.ShutDown()
        return action

    def _fork(self, fork: events.ForkWorker, tasks: asyncio.TaskGroup) -> events.Event:
        assert self.warm is not None
        slot = fork.slot
        worker = WorkerId(self._config.name, slot)
        process = self._start_worker(worker, new_incarnation(self._environment), self._listener)
        self.processes[process.incarnation] = process
        wanted = Fork(
            slot=slot,
            incarnation=process.incarnation,
            kind=fork.job.model.family,
            compiles=fork.job.training.compile,
            optimizes=fork.job.training.optimizer.code is not None,
        )
        self.warm.fork(wanted, process)
        gpu = self._config.gpu_of(slot)
        launch = Launch(
            worker=worker,
            job_id=fork.job_id,
            job=fork.job,
            address=self.address,
            agent_pid=os.getpid(),
            device_kind=self._config.device_kind,
            device="cpu" if gpu is None else "cuda:0",
            visible="" if gpu is None else gpu.visible,
            cpus=() if gpu is None else gpu.cpus,
            context_bytes=self._config.gpu_context_bytes,
            silence_s=fork.silence_s,
            allow_code=self._config.allow_code,
            passed=fork.passed,
            ready_by=fork.ready_by,
            replaced=fork.replaced,
            workers=self._config.worker_slots,
            faults=fork.faults,
        )
        # Wait for GPU memory only: host memory is freed faster than the next process takes it.
        freed = self._freeing[slot][1] if gpu is not None and slot in self._freeing else None
        later = freed is not None or fork.job.code is not None
        if later:
            tasks.create_task(process.serve(launch, partial(self._complete, freed)))
        else:
            tasks.create_task(process.serve(launch))
        return events.ForkRequested(slot=slot, incarnation=process.incarnation, fetches=later)

    async def _complete(self, freed: asyncio.Event | None, launch: Launch) -> Launch:
        """Return the whole launch, once the GPU's memory is `freed` and the job's code is there."""
        if freed is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(FREED_S):
                    await freed.wait()
            # After a time-out, do not make later processes of the slot wait for the same event.
            self._freeing = {
                slot: (pid, event)
                for slot, (pid, event) in self._freeing.items()
                if event is not freed
            }
        return launch if launch.job.code is None else await self.wheels.complete(launch)

    def _kill(self, incarnation: Incarnation, what: str, reason: str) -> None:
        process = self.processes[incarnation]
        fields = {"worker": process.worker, "pid": process.pid, "reason": reason}
        logger.warning(what, extra=fields)
        process.kill()

"""The daemons of the simulated cluster: the real agent and master cores, with stand-ins for what
the kernel gives them (processes, pipes, the network, a disk that may fail).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation import trainer as training
from simulation.books import Book
from simulation.clockwork import Killed, Process
from simulation.network import Stub, Wire
from simulation.trainer import Trainer

from oobleck.agent.__main__ import FAREWELL_S
from oobleck.agent.config import AgentConfig
from oobleck.agent.connection.outbox import Outbox
from oobleck.agent.connection.session import Session
from oobleck.agent.processes.children import Listener
from oobleck.agent.processes.output import Tail
from oobleck.agent.processes.pool import new_incarnation
from oobleck.agent.supervisor import Supervisor
from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Fork, FromWorker, Launch, ToWorker
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.master.config import MasterConfig
from oobleck.master.events.unions import Event, Journaled, StreamOpened
from oobleck.master.loop import Master
from oobleck.master.planning.process import Replies
from oobleck.master.planning.requests import PlanReply, PlanRequest
from oobleck.master.planning.solve import AtOnce
from oobleck.master.process import locked
from oobleck.master.state.cluster import ClusterState
from oobleck.master.storage.disk import StorageFailed
from oobleck.master.storage.journal import Journal
from oobleck.proto import control_pb2 as pb
from oobleck.proto.types import Assignment, Head

if TYPE_CHECKING:
    from simulation.world import World

_SIGKILL = 9


class NoMarker:
    """`oobleck.host.ipc.marker.Marker` of a process that runs no code of a user's. It has no
    descriptor: thousands are made."""

    def verdict(self, status: int | None) -> str:
        return ""


class WorkerHandle:
    """An agent's ends of a worker: what `oobleck.agent.processes.children.WorkerProcess` is."""

    def __init__(
        self,
        world: "World",
        agent: "Agent",
        worker: WorkerId,
        incarnation: Incarnation,
        to: Listener,
    ) -> None:
        self.worker = worker
        self.slot = worker.slot
        self.incarnation = incarnation
        self.pid: int | None = None
        self.tail = Tail()
        self.marker = NoMarker()
        self.silent = asyncio.Event()
        self.buried = False
        self.trainer: Trainer | None = None
        self._world = world
        self._agent = agent
        self._listener = to
        self._launch: Launch | None = None
        self._inbound: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self._unsent: list[ToWorker] = []
        self._down_at = self._up_at = 0.0

    def forked(self, pid: int) -> None:
        self.pid = pid

    async def serve(self, launch: Launch) -> None:
        self._launch = launch
        while (message := await self._inbound.get()) is not None:
            if self._agent.process.alive:
                self._listener.received(self.incarnation, message)
        self.silent.set()
        if self._agent.process.alive:
            self._listener.channel_closed(self.incarnation)

    def begin(self) -> None:
        """The process is there."""
        assert self._launch is not None
        name = f"{self._agent.name}/{self.slot}.{self.incarnation[:4]}"
        process = Process(self._world.loop, name)
        process.stopped = self._agent.host_stopped
        trainer = Trainer(self._world, self._launch, self.incarnation, process)
        self.trainer = trainer
        trainer.report = self._said
        process.on_end.append(self._closed)
        self._agent.trainers[self.incarnation] = trainer
        self._world.endpoints[trainer.endpoint] = trainer
        process.spawn(training.run(trainer))
        for message in self._unsent:
            self.send(message)

    def _said(self, message: FromWorker | None) -> None:
        self._up_at = max(self._up_at, self._world.loop.clock + self._world.short_s())
        self._world.loop.call_at(
            self._up_at, self._inbound.put_nowait, message, context=self._agent.process.context
        )

    def _closed(self) -> None:
        self._said(None)
        self._agent.trainers.pop(self.incarnation, None)
        assert self.trainer is not None
        self._world.endpoints.pop(self.trainer.endpoint, None)

    def send(self, message: ToWorker) -> None:
        if self.trainer is None:
            self._unsent.append(message)
        elif self._agent.process.alive:
            self._down_at = max(self._down_at, self._world.loop.clock + self._world.short_s())
            self._world.loop.call_at(
                self._down_at, self.trainer.hear, message, context=self.trainer.process.context
            )

    def kill(self) -> None:
        if self.trainer is not None and self._agent.process.alive:
            self._world.end_worker(self.trainer, signal=_SIGKILL)

    def kernel_state(self) -> str:
        if self.trainer is None or not self.trainer.process.alive:
            return ""
        return "T" if self.trainer.process.stopped else "S"

    def write_stacks(self) -> None:
        pass

    def release(self) -> None:
        """Of a process that never began there is nothing else to tell of its end."""
        if self.trainer is None:
            self._said(None)


class WarmHandle:
    """What `oobleck.agent.processes.children.WarmProcess` is."""

    def __init__(self, world: "World", agent: "Agent", to: Listener) -> None:
        self._world = world
        self._agent = agent
        self._listener = to
        self._ended = asyncio.Event()
        self.alive = True
        agent.warm = self

    async def run(self, command: object, environment: object) -> None:
        waiting = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((waiting,), timeout=self._world.draw.uniform(0.3, 2.0))
        if self._agent.name in self._world.unstartable and not self._ended.is_set():
            self.kill()
        if not self._ended.is_set():
            self._listener.warm_ready()
        await waiting
        self._listener.warm_exited(-_SIGKILL, "")

    def fork(self, request: Fork, worker: WorkerHandle) -> None:
        self._agent.process.later(self._world.short_s(), self._fork, worker)

    def _fork(self, worker: WorkerHandle) -> None:
        if not self.alive or not self._agent.process.alive:
            return
        if self._world.draw.random() < self._world.fork_failures:
            self._listener.fork_failed(worker.incarnation, "Cannot allocate memory")
            return
        worker.begin()
        self._listener.forked(worker.incarnation, self._world.next_pid())

    def exited(self, pid: int, exit_code: int | None, signal: int | None) -> None:
        if self.alive:
            delay_s = self._world.short_s()
            self._agent.process.later(delay_s, self._tell_exit, pid, exit_code, signal)

    def _tell_exit(self, pid: int, exit_code: int | None, signal: int | None) -> None:
        if self._agent.process.alive:
            self._listener.child_exited(pid, exit_code, signal)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            for trainer in list(self._agent.trainers.values()):
                trainer.process.kill()
            self._ended.set()


class WatchedOutbox(Outbox):
    def __init__(self, world: "World", agent: "Agent") -> None:
        super().__init__(agent.incarnation)
        self._world = world
        self._agent = agent
        #: What is to be said beside the truth.
        self._lies: list[pb.AgentMessage] = []

    def lie(self, messages: list[pb.AgentMessage]) -> None:
        self._lies += messages
        self.wake.set()

    def take(self, now: float) -> list[pb.AgentMessage]:
        lies, self._lies = self._lies, []
        for message in lies:
            message.incarnation = self._incarnation
        return [*super().take(now), *lies]

    def acknowledge(self, job_id: JobId, through_step: int) -> None:
        book = self._agent.talks_to
        assert book is not None
        self._world.ledger(job_id).acknowledged(through_step, book, self._agent.process)
        super().acknowledge(job_id, through_step)


class WatchedSupervisor(Supervisor):
    """Hears nothing once its process has ended."""

    def __init__(self, agent: "Agent", *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        self._agent = agent

    def assigned(self, desired: Assignment) -> None:
        if self._agent.process.alive:
            self._agent.world.watch.assigned(self._agent, desired)
            super().assigned(desired)


class Agent:
    """One start of an agent on a node."""

    def __init__(self, world: "World", name: NodeName, slots: int, wire: Wire) -> None:
        self.name = name
        self.slots = slots
        self.wire = wire
        self.world = world
        self.process = Process(world.loop, f"agent {name}")
        self.trainers: dict[Incarnation, Trainer] = {}
        self.warm: WarmHandle | None = None
        self.host_stopped = False
        config = AgentConfig(
            master="master:1",
            name=name,
            hostname=f"host-{name}",
            worker_slots=slots,
            gpus=(),
            address="10.0.0.1",
            memory_per_worker_bytes=1 << 30,
            faults=(),
            warm_command=(),
            environment={},
        )
        environment = world.environment(name)
        incarnation = self.incarnation = new_incarnation(environment)
        endpoint = Endpoint(address="master:1")
        #: Over the newest channel.
        self._stub: Stub | None = None
        #: The head whose word it acted on last, and the directory that this had.
        self.acted_on: Head | None = None
        self.follows: Book | None = None
        #: As it was told last.
        self.job_id: JobId | None = None
        #: Directories of the heads that have admitted it.
        self.met: set[Book] = set()
        self.outbox = WatchedOutbox(world, self)
        self.supervisor = WatchedSupervisor(
            self,
            config,
            self.outbox,
            environment,
            start_warm=lambda to: WarmHandle(world, self, to),  # type: ignore[arg-type,return-value]
            start_worker=lambda worker, process, to: WorkerHandle(  # type: ignore[arg-type,return-value]
                world, self, worker, process, to
            ),
        )
        self.session = Session(
            config,
            incarnation,
            self.outbox,
            environment,
            endpoint=lambda: endpoint,
            node=self.supervisor,
        )
        self._closing = False
        self.process.on_end.append(self._ended)
        self.process.spawn(self._run())

    @property
    def talks_to(self) -> Book | None:
        """The directory of the head that its newest stream has got to; None: it has to none."""
        stream = self._stub.stream if self._stub is not None else None
        return stream.head.book if stream is not None and stream.head is not None else None

    async def _run(self) -> None:
        """As `oobleck.agent.__main__` does."""
        supervising = asyncio.ensure_future(self.supervisor.run())
        talking = asyncio.ensure_future(self._talk())
        await asyncio.wait((supervising, talking), return_when=asyncio.FIRST_COMPLETED)
        refusal = talking.result() if talking.done() else None
        if refusal is not None and self.trainers:
            self.world.watch.broken(f"{self.name} ends its workers for a refusal: {refusal}")
        self.supervisor.shut_down()
        await supervising
        self._closing = True
        self.session.close()
        await asyncio.wait((talking,), timeout=FAREWELL_S)
        if self.process.alive:
            self.world.note(f"agent {self.name} ends: {refusal or 'told to'}")
            self.process.kill()

    async def _talk(self) -> str | None:
        """Sessions over one channel after the other."""
        while not self._closing and not self.outbox.current_status.ending:
            stub = self._stub = Stub(self.world, self.wire, self.process)
            if (refusal := await self.session.converse(stub)) is not None:  # type: ignore[arg-type]
                return refusal
        return None

    def _ended(self) -> None:
        """The kernel kills the warm process with it, and the workers with that."""
        if self.warm is not None:
            self.warm.alive = False
        for trainer in list(self.trainers.values()):
            trainer.process.kill()

    def stop_host(self) -> None:
        self.host_stopped = True
        for process in self._processes():
            process.stop()

    def continue_host(self) -> None:
        self.host_stopped = False
        for process in self._processes():
            process.go_on()

    def _processes(self) -> list[Process]:
        return [self.process, *(trainer.process for trainer in self.trainers.values())]


class WatchedJournal(Journal):
    """The real one, on a disk that may be full, in a process that may be killed at any write."""

    def __init__(self, world: "World", path: Path, book: Book) -> None:
        self._world = world
        self._book = book
        self._uncommitted: list[Journaled] = []
        self.process: Process | None = None
        #: Calls until it is killed: before or after the commit has reached the disk.
        self.dies_in: int | None = None
        self.dies_after = False
        super().__init__(path)
        self._learn()

    def _learn(self) -> None:
        """What a master that died in the middle of a commit has left of it counts."""
        more = self._last - self._book.sequence
        if more < 0:
            self._world.watch.broken(f"the journal has lost {-more} events")
        for _, event in deque(self.replay(), maxlen=max(0, more)):
            self._world.watch.journaled(event, self._book)  # type: ignore[arg-type]  # no snapshot has no more

    @property
    def is_behind(self) -> bool:
        return bool(self._uncommitted)

    def append(self, event: Journaled, unix: float) -> None:
        self._check()
        super().append(event, unix)
        self._uncommitted.append(event)

    def commit(self) -> None:
        self._check()
        if self._uncommitted and self._world.disk_full:
            raise StorageFailed("the disk is full")
        waiting, self._uncommitted = self._uncommitted, []
        if waiting and self.dies_in is not None:
            self.dies_in -= 1
        dies = waiting and self.dies_in is not None and self.dies_in <= 0
        if dies and not self.dies_after:
            self._die("before a commit")
        self._world.disk.journal_writes = True
        try:
            super().commit()
        finally:
            self._world.disk.journal_writes = False
        others = (head.journal for head in self._world.live_heads if head.book is self._book)
        if waiting and any(journal is not self for journal in others):
            self._world.watch.broken("two masters decide")
        for event in waiting:
            self._world.watch.journaled(event, self._book)
        if dies:
            self._die("after a commit")

    def _check(self) -> None:
        if self.process is not None and not self.process.alive:
            raise Killed

    def _die(self, when: str) -> None:
        assert self.process is not None
        self._world.note(f"master killed {when}")
        self.process.kill()
        raise Killed


class SlowPlanner:
    """The planning process: the real replies, some time after they were wanted."""

    def __init__(self, world: "World", process: Process) -> None:
        self._world = world
        self._process = process
        self._replies = Replies()
        self._wanted: PlanRequest | None = None
        self._at_work = False
        self._tell: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        pass

    def reply(self, request: PlanRequest) -> PlanReply:
        return self._replies.reply(request)

    def foresee(self, requests: tuple[PlanRequest, ...]) -> None:
        """Nothing is made ahead."""

    def listen(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def want(self, request: PlanRequest | None) -> None:
        self._replies.forget_unused()
        self._wanted = request
        self._begin()

    def _begin(self) -> None:
        request = self._wanted
        if request is not None and request not in self._replies and not self._at_work:
            self._at_work = True
            reply = AtOnce().reply(request)
            self._process.later(self._world.planning_s(), self._answered, request, reply)

    def _answered(self, request: PlanRequest, reply: PlanReply) -> None:
        self._at_work = False
        if self._process.alive:
            self._replies.add(request, reply)
            self._begin()
            self._tell()


class MasterHost:
    """One start of the master on the head node."""

    def __init__(self, world: "World", config: MasterConfig) -> None:
        self._world = world
        self.process = Process(world.loop, "master")
        self._path = config.state_dir / "journal.log"
        self._lock = ExitStack()
        self._lock.enter_context(locked(config.state_dir))
        self.book = world.book(config.state_dir)
        #: Most events that an agent had heard that came to it, and its directory does not have.
        self.lacks = 0
        self.journal = WatchedJournal(world, self._path, self.book)
        self.journal.process = self.process
        self.process.on_end.append(self._ended)
        environment = world.environment("master")
        planner = SlowPlanner(world, self.process)
        self.core: Master = self.process.context.run(
            Master, config, self.journal, environment, planner
        )
        self.core.watch(self._heard)
        self.book.starts += 1
        world.heads[self.book] = self
        self.process.spawn(self._run())

    async def _run(self) -> None:
        try:
            await self.core.run()
        except StorageFailed as failed:
            self._world.note(f"master ends: {failed}")
            self.process.kill()
        except Killed:
            pass

    def _heard(self, state: ClusterState, event: Event) -> None:
        if isinstance(event, StreamOpened):
            incarnation = state.nodes[event.node].facts.incarnation
            agents = self._world.all_agents()
            agent = next((a for a in agents if a.incarnation == incarnation), None)
            if agent is not None:
                agent.met.add(self.book)
            # One that has heard more since comes again.
            if agent is not None and agent.acted_on == event.acted_on:
                self.lacks = max(self.lacks, self._world.watch.lacking(agent, self.book))

    def _ended(self) -> None:
        """What was not committed is gone; what the last write left behind may be a part of one."""
        self.journal.close()
        self.core.close()
        self._lock.close()
        if torn := self._world.torn_bytes():
            with open(self._path, "ab") as file:
                file.write(torn)

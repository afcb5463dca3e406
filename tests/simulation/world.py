"""A whole cluster in virtual time: hosts, their network, the operator, and what befalls them.

Everything that happens follows from the seed. Owns the transcript.
"""

import asyncio
import dataclasses
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from pathlib import Path

from simulation.books import Book
from simulation.clockwork import Killed, Process, VirtualLoop, current
from simulation.disk import Disk
from simulation.gathering import Gathering
from simulation.machines import Agent, MasterHost
from simulation.network import Wire
from simulation.trainer import Trainer
from simulation.watch import Ledger, Watch

from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.messages import Assign
from oobleck.core.routes import LayerLost, require_holders
from oobleck.host.detection import Detection
from oobleck.host.system.environment import Environment
from oobleck.master.config import MasterConfig
from oobleck.master.events.unions import Journaled
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.worker.recovery.rejoin import agree
from support.scenario import told

#: A job with a checkpoint that waits for nodes so long gives way: within a drill's trouble.
_GIVES_WAY_S = 8.0
#: Virtual calendar at the start.
UNIX = 1_700_000_000.0


class World:
    def __init__(self, seed: int, state_dir: Path, timing: Detection, limit_s: float) -> None:
        self.draw = random.Random(seed)
        self._own = copy_context()
        self._seed = seed
        self.loop = VirtualLoop(limit_s)
        self.transcript: list[str] = []
        self.watch = Watch(self)
        self.config = MasterConfig(
            listen="master:1",
            state_dir=state_dir / "head-1",
            place="head-1",
            timing=timing,
            gives_way_s=_GIVES_WAY_S,
            validate=True,
        )
        self._directories = 1
        self.books: dict[Path, Book] = {}
        #: The newest start of each.
        self.heads: dict[Book, MasterHost] = {}
        #: The newest start of the one that goes on for good.
        self.master: MasterHost | None = None
        #: Another one that answers in its place, and one beside it, for a while.
        self.stand_in: MasterHost | None = None
        self.rival: MasterHost | None = None
        self.agents: dict[NodeName, Agent] = {}
        #: Others with the name of a node, over wires of their own.
        self.twins: dict[NodeName, Agent] = {}
        self.wires: dict[NodeName, Wire] = {}
        self.endpoints: dict[str, Trainer] = {}
        self._gatherings: dict[str, Gathering] = {}
        self.ledgers: dict[JobId, Ledger] = {}
        #: Directions between nodes in which nothing of the data plane arrives.
        self.cut: set[tuple[NodeName, NodeName]] = set()
        self._dead_hosts: set[Process] = set()
        #: Nodes without power: nothing comes from them, not even the end of a connection.
        self.dark: set[NodeName] = set()
        self.disk = Disk()
        self.disk.reached = self._reached_point
        self.disk_full = False
        self.fork_failures = 0.0
        self.torn = False
        #: A training thread has hung.
        self.hung = False
        #: Workers of a node were killed again and again.
        self.flapped = False
        #: How far the calendar of each host is off.
        self._calendars: dict[str, float] = {}
        self.step_s = 0.4
        self.save_every = 8
        #: Step at which a job's model raises an exception.
        self.fails_at: dict[JobId, int] = {}
        #: The agents that a worker told of that, which had trained before.
        self._raised: dict[JobId, list[Agent]] = {}
        #: The only node that trains and says what is not so; None: none has yet.
        self.liar: NodeName | None = None
        #: Nodes whose workers fail by their host's fault, and where none can be started.
        self.sick: set[NodeName] = set()
        self.unstartable: set[NodeName] = set()
        #: Faults may still strike; and since when they do not.
        self.in_trouble = True
        self.peace_at = 0.0
        #: Strikes to come: at which phase, and after which generation.
        self._ambushes: list[tuple[str, int, Callable[[], None]]] = []
        #: How far that of the master was ever off.
        self._jumps = {0.0}
        self._starts = 0
        self._pids = 1000

    # ---- what the parts ask for

    def environment(self, host: str) -> Environment:
        """Chance of its own for each start of a daemon, so that others do not shift it."""
        self._starts += 1
        number = self._starts
        own = random.Random(f"{self._seed} {host} {number}")
        return Environment(
            now=lambda: self.loop.clock,
            unix=lambda: self.unix(host),
            pid=lambda: number,
            token=lambda size: own.randbytes(size).hex(),
            uniform=own.uniform,
        )

    def unix(self, host: str) -> float:
        return UNIX + self.loop.clock + self._calendars.get(host, 0.0)

    def jump(self, host: str, seconds: float) -> None:
        """The calendar of a node or of the master jumps; spans do not."""
        self._calendars[host] = self._calendars.get(host, 0.0) + seconds
        if host == "master":
            self._jumps.add(self._calendars[host])

    def moments(self, unix: float) -> list[float]:
        """When the master's calendar may have shown that."""
        return [unix - UNIX - jump for jump in sorted(self._jumps)]

    def ambush(self, phase: str, after: int, strike: Callable[[], None]) -> None:
        """Strike when the first worker gets to the phase in a generation later than `after`."""
        self._ambushes.append((phase, after, strike))

    @property
    def in_ambush(self) -> bool:
        """Whether a strike is still to come."""
        return bool(self._ambushes)

    def reached(self, phase: str, generation: int) -> None:
        for ambush in list(self._ambushes):
            where, after, strike = ambush
            if where == phase and generation > after:
                self._ambushes.remove(ambush)
                self.loop.call_soon(strike, context=self._own)

    def delay_s(self) -> float:
        """Of a message between hosts: now and then a long one."""
        if self.draw.random() < 0.01:
            return self.draw.uniform(0.1, 1.5)
        return self.draw.uniform(0.0005, 0.02)

    def short_s(self) -> float:
        """Of a message inside a host."""
        return self.draw.uniform(0.0002, 0.003)

    def planning_s(self) -> float:
        """Until a plan that the master wants is there: sometimes seconds."""
        if self.draw.random() < 0.1:
            return self.draw.uniform(0.5, 4.0)
        return self.draw.uniform(0.005, 0.1)

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def torn_bytes(self) -> bytes:
        """What a write that was cut off has left behind the last whole one."""
        return self.draw.randbytes(self.draw.randint(1, 5000)) if self.torn else b""

    def ledger(self, job_id: JobId) -> Ledger:
        if job_id not in self.ledgers:
            self.ledgers[job_id] = Ledger(job_id, self)
        return self.ledgers[job_id]

    def gathering(
        self, assign: Assign, members: tuple[WorkerId, ...], meeting: str = ""
    ) -> Gathering:
        prefix = assign.rendezvous.prefix + meeting
        if prefix not in self._gatherings:
            self._gatherings[prefix] = Gathering(self, assign, members)
        return self._gatherings[prefix]

    def host_at(self, card: str) -> Trainer | None:
        return self.endpoints.get(card)

    @property
    def live_master(self) -> MasterHost | None:
        return self.master if self.master is not None and self.master.process.alive else None

    @property
    def head(self) -> MasterHost | None:
        """Who is at the address."""
        return self.stand_in or self.master

    @property
    def has_replaced_head(self) -> bool:
        """Whether any but the first directory was ever in use."""
        return self._directories > 1

    @property
    def live_heads(self) -> list[MasterHost]:
        heads = (self.master, self.stand_in, self.rival)
        return [head for head in heads if head is not None and head.process.alive]

    @property
    def state(self) -> ClusterState | None:
        """As the live master has it."""
        return self.live_master.core.state if self.live_master is not None else None

    def all_agents(self) -> Iterator[Agent]:
        yield from self.agents.values()
        yield from self.twins.values()

    def agent_of(self, trainer: Trainer) -> Agent:
        return next(a for a in self.all_agents() if trainer.incarnation in a.trainers)

    def raised(self, trainer: Trainer) -> None:
        self._raised.setdefault(trainer.job_id, []).append(self.agent_of(trainer))

    def tells_of_an_exception(self, job_id: JobId, book: Book) -> bool:
        """Whether an agent is there whose worker's model has raised one, and that can have told
        only heads of this directory."""
        raised = self._raised.get(job_id, ())
        return any(agent.process.alive and agent.met == {book} for agent in raised)

    def trainers(self) -> Iterator[Trainer]:
        for agent in self.all_agents():
            yield from agent.trainers.values()

    def have_all(self, job: Job, trainers: Sequence[Trainer]) -> bool:
        """Whether the workers have all of the job's newest state between them."""
        if not trainers:
            return False
        layers = job.spec.model.layer_count
        agreement = agree({t.worker: t.recovery_state(layers) for t in trainers})
        if agreement.step < max(self.ledger(job.id).steps, default=0):
            return False  # what they have is out of date
        try:
            require_holders(agreement.held, layers)
        except LayerLost:
            return False
        return True

    def all_live(self, assign: Assign) -> bool:
        live = {trainer.worker for trainer in self.trainers()}
        return live >= set(assign.plan.workers)

    def can_talk(self, one: Trainer, other: Trainer) -> bool:
        return self.all_can_talk((one.node, other.node))

    def all_can_talk(self, nodes: Iterable[NodeName]) -> bool:
        if not self.cut and not self.dark:
            return True
        among = set(nodes)
        return not among & self.dark and not any(a in among and b in among for a, b in self.cut)

    def is_host_dead(self, process: Process) -> bool:
        return process in self._dead_hosts

    def end_worker(
        self, trainer: Trainer, *, exit_code: int | None = None, signal: int | None = None
    ) -> None:
        """The process ends; the warm process, its parent, tells."""
        agent = next((a for a in self.all_agents() if trainer.incarnation in a.trainers), None)
        trainer.process.kill()
        if agent is None or agent.warm is None:
            return
        for worker in list(agent.supervisor._state.workers.values()):
            if worker.incarnation == trainer.incarnation and worker.pid is not None:
                agent.warm.exited(worker.pid, exit_code, signal)
                if worker.pid % 2 and (exit_code or signal):  # its end is seen before it is told
                    how = exit_code, signal
                    agent.process.later(0.0, agent.supervisor.ending, worker.incarnation, how)

    # ---- the transcript

    def note(self, text: str) -> None:
        self.transcript.append(f"{self.loop.clock:9.3f} {text}")

    def note_decision(self, event: Journaled) -> None:
        self.note(f"> {told(event)}")

    # ---- what happens

    def start_agent(self, name: NodeName, slots: int) -> None:
        self.wires.setdefault(name, Wire())
        self.dark.discard(name)
        self.agents[name] = Agent(self, name, slots, self.wires[name])
        self.look_over()

    def start_twin(self, name: NodeName, slots: int) -> None:
        self.twins[name] = Agent(self, name, slots, Wire())

    def end_twin(self, name: NodeName) -> None:
        if (twin := self.twins.pop(name, None)) is not None:
            twin.process.kill()

    def start_master(self) -> None:
        self.master = MasterHost(self, self.config)

    def restart_master(self) -> None:
        if self.live_master is None and self.stand_in is None and not self.disk_full:
            self.note("! master started")
            self.start_master()

    def book(self, state_dir: Path) -> Book:
        return self.books.setdefault(state_dir, Book(name=state_dir.name))

    def directory(self, *, copied: bool, put_back: bool = False) -> MasterConfig:
        """Make a state directory, empty or a copy of the master's as it is now."""
        self._directories += 1
        name, place = f"head-{self._directories}", self.config.place
        state_dir = self.config.state_dir.with_name(name)
        if copied:
            shutil.copytree(self.config.state_dir, state_dir)
            book = self.book(self.config.state_dir).copy(name, put_back=put_back)
            for ledger in self.ledgers.values():
                ledger.copied(book)
            self.books[state_dir] = book
        return dataclasses.replace(
            self.config, state_dir=state_dir, place=place if put_back else name
        )

    def by_itself(self, delay_s: float, act: Callable[[], None]) -> None:
        """Whoever asks may be dead by then."""
        self.loop.call_later(delay_s, act, context=self._own)

    def _reached_point(self, point: str) -> None:
        """The master has got to a point at which it may be made to die."""
        master = self.live_master
        if master is not None and current() is master.process and self.disk.strikes(point):
            self.note(f"master killed when {point}")
            master.process.kill()
            raise Killed

    def lose_host(self, name: NodeName) -> None:
        """Power is gone: nobody is told."""
        agent = self.agents[name]
        self.dark.add(name)
        self._dead_hosts.add(agent.process)
        agent.process.kill()

    def end(self) -> None:
        """Kill everything that is left, and have it go."""
        self.loop.at_rest = lambda: None
        for agent in list(self.all_agents()):
            agent.process.kill()
        for head in self.live_heads:
            head.process.kill()
        for _ in range(20):
            if all(task.done() for task in asyncio.all_tasks(self.loop)):
                break
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.loop.close()

    def set_cut(self, cut: set[tuple[NodeName, NodeName]]) -> None:
        self.cut = cut
        self.look_over()

    def look_over(self) -> None:
        """The network has changed, or processes have stopped or gone on."""
        for gathering in list(self._gatherings.values()):
            gathering.reconnected()
        twins = (twin.wire for twin in self.twins.values())
        for wire in (*self.wires.values(), *twins):
            wire.set(up=wire.up, down=wire.down)

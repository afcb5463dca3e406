"""A process full of agents without workers, for `bench.master_scale`.

Towards the master each is a real agent: its own connection and certificate, and the session and
outbox of `oobleck.agent`, so registrations, heartbeats, reconnects and what a restarted master
hears are the real ones. What stands in for processes is here: a worker that is ready at once,
reaches the phases of every plan that counts on it, and commits the steps that it is told of.

Speaks with the bench in lines of JSON: commands on the standard input, until its end, and news on
the standard output. Moments are readings of the monotonic clock, which all processes share.
"""

import asyncio
import json
import logging
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from oobleck.agent.config import AgentConfig
from oobleck.agent.connection.outbox import HOLD_S, Outbox
from oobleck.agent.connection.reports import hold_s
from oobleck.agent.connection.session import Session, channel_options
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.messages import PeerLost, PhaseReached, Record, StepRecord
from oobleck.core.plan import Plan
from oobleck.host.detection import Detection
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import Credentials
from oobleck.host.security.pki import Authority, Identity, key_pem, new_key, read_key
from oobleck.host.system.environment import Environment
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.secure import open_aio_channel
from oobleck.proto.types import Assignment, NodeStatus, WorkerReport, WorkerStatus

#: A connection of its own for every agent, as if each were on a host of its own.
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
Phase = Literal["aborted", "joined", "transferred"]
#: Seconds from the news of a plan until a worker has reached the phase; up to half as much again.
_PHASES: tuple[tuple[Phase, float], ...] = (
    ("aborted", 0.03),
    ("joined", 0.3),
    ("transferred", 0.5),
)
#: Time within which all workers reach the end of a step.
_SPREAD_S = 0.2
#: Time for which news are gathered, to be sent in one line.
_NEWS_S = 0.02
#: Niceness of agents: with fewer cores than hosts, the measuring process and the master have
#: priority.
_NICE = 5


def node_name(number: int) -> NodeName:
    return NodeName(f"n{number:04}")


class News:
    """News for the bench, gathered into few lines."""

    def __init__(self) -> None:
        self._lines: dict[str, list[object]] = {}
        self._plans: set[Generation] = set()

    def tell(self, kind: str, *what: object) -> None:
        if not self._lines:
            asyncio.get_running_loop().call_later(_NEWS_S, self._flush)
        self._lines.setdefault(kind, []).append(what)

    def plan(self, plan: Plan) -> None:
        """Send the plan's nodes, by rank, once, although many agents receive the plan."""
        if plan.generation not in self._plans:
            self._plans.add(plan.generation)
            ranks = [int(worker.node.removeprefix("n")) for worker in plan.workers]
            self.tell("plan", plan.generation, ranks)

    def _flush(self) -> None:
        lines, self._lines = self._lines, {}
        print(json.dumps(lines), flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """State that the agents of one process share."""

    master: str
    memory_bytes: int
    authority: Authority
    news: News

    def credentials(self, name: NodeName) -> Credentials:
        key, identity = new_key(), Identity(role="agent", name=name)
        certificate = self.authority.sign(key.public_key(), identity, 86_400.0)
        return Credentials(
            authority=self.authority.certificate, certificate=certificate, key=key_pem(key)
        )


class Agent:
    def __init__(self, number: int, crowd: Crowd) -> None:
        self._number, self._crowd, self._news = number, crowd, crowd.news
        self._environment = Environment()
        incarnation = self._incarnation()
        self._outbox = Outbox(incarnation)
        name = node_name(number)
        config = AgentConfig(
            master=crowd.master,
            name=name,
            hostname=name,
            worker_slots=1,
            gpus=(),
            address="127.0.0.1",
            memory_per_worker_bytes=crowd.memory_bytes,
            faults=(),
            warm_command=(),
            environment={},
        )
        self._endpoint = Endpoint(address=crowd.master, credentials=crowd.credentials(name))
        self._detection = Detection()
        self._session = Session(
            config,
            incarnation,
            self._outbox,
            self._environment,
            endpoint=lambda: self._endpoint,
            node=self,
        )
        #: None: no worker.
        self._job_id: JobId | None = None
        self._worker = Incarnation("")
        self._told = self._entered = Generation(0)
        self._step, self._beats = -1, 0
        self.hold_s = HOLD_S
        #: Loss that is reported again in each new session, until there is a newer plan.
        self._lost: WorkerReport | None = None

    def _incarnation(self) -> Incarnation:
        return Incarnation(self._environment.token(8))

    async def live(self, after_s: float) -> None:
        """Run until cancelled, or until the master refuses for good."""
        await asyncio.sleep(after_s)
        refusal = None
        while refusal is None:
            options = (*channel_options(self._detection), _OWN_CONNECTION)
            async with open_aio_channel(self._endpoint, options) as channel:
                stub = rpc.ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
                refusal = await self._session.converse(stub)
        raise RuntimeError(f"{node_name(self._number)} is refused: {refusal}")

    # ---- from the master

    def reached_from(self, address: str) -> None:
        pass

    def session_open(self, is_open: bool) -> None:
        pass

    def record(self, job_id: JobId, wish: Record) -> None:
        pass

    def not_understood(self, reason: str) -> None:
        raise ValueError(reason)

    @property
    def has_workers(self) -> bool:
        return self._job_id is not None

    def acknowledged(self, job_id: JobId, step: int, evaluation: int) -> None:
        pass  # its workers take no checkpoints

    def return_code(self, digest: str) -> None:
        pass  # its jobs bring none

    def standing_reports(self) -> list[WorkerReport]:
        return [] if self._lost is None else [self._lost]

    def detect(self, detection: Detection) -> None:
        self._detection = detection
        self._news.tell("welcomed", self._number, time.monotonic())

    def assigned(self, desired: Assignment) -> None:
        assign = desired.assign
        if desired.job_id is None:
            self._job_id = None
        elif desired.job_id != self._job_id or (assign is None and self._told):
            # A worker of another job, or one left out of the plan, loses its state: make a new one.
            self._job_id, self._worker = desired.job_id, self._incarnation()
            self._step = -1
        if assign is None:
            self._told = self._entered = Generation(0)
            self.hold_s = HOLD_S
        elif desired.generation > self._told and self._worker in desired.worker_incarnations:
            self._enter(assign.plan)
        self._tell()

    def _enter(self, plan: Plan) -> None:
        generation = self._told = plan.generation
        self._news.plan(plan)
        self.hold_s = hold_s(plan, node_name(self._number))
        self._lost = None
        self._news.tell("told", self._number, generation, time.monotonic())
        loop = asyncio.get_running_loop()
        for phase, after_s in _PHASES:
            loop.call_later(after_s * random.uniform(1, 1.5), self._reach, generation, phase)

    def _reach(self, generation: Generation, phase: Phase) -> None:
        if generation != self._told:
            return
        reached = PhaseReached(
            generation=generation, phase=phase, committed_step=self._step, redo=False
        )
        self._outbox.report(self._report(reached), self._environment.now())
        if phase == "transferred":
            self._entered = generation
            self._tell()
            self._news.tell("entered", self._number, generation)

    # ---- what happens on its host

    def commit(self, record: StepRecord) -> None:
        """Commit the step, if the worker is in its generation."""
        if self._job_id is not None and record.generation == self._entered:
            self._step = record.step
            self._outbox.record(self._job_id, record, self._environment.now())
            self._tell()

    def lose_peer(self) -> None:
        lost = PeerLost(generation=self._entered, step=self._step + 1, detail="closed")
        self._lost = self._report(lost)
        self._outbox.report(self._lost, self._environment.now())

    def _report(self, what: PhaseReached | PeerLost) -> WorkerReport:
        assert self._job_id is not None
        return WorkerReport(job_id=self._job_id, slot=0, incarnation=self._worker, what=what)

    def _tell(self) -> None:
        self._beats += 1
        workers: tuple[WorkerStatus, ...] = ()
        if self._job_id is not None:
            worker = WorkerStatus(
                slot=0,
                incarnation=self._worker,
                pid=10_000 + self._number,
                card=f"127.0.0.1:{10_000 + self._number}",
                data="ab" * 16,
                generation=self._entered,
                committed_step=self._step,
                peak_memory_bytes=1 << 33,
                base_memory_bytes=1 << 28,
                beats=self._beats,
                doing="forward" if self._entered else "waiting for a plan",
            )
            workers = (worker,)
        status = NodeStatus(job_id=self._job_id, generation=self._told, workers=workers)
        self._outbox.status(status, self._environment.now(), hold_s=self.hold_s)


class Hosts:
    """Agents of this process, and the bench's commands to them."""

    def __init__(self, crowd: Crowd, numbers: Sequence[int], tasks: asyncio.TaskGroup) -> None:
        """Make the agents. `tasks`: group in which they run."""
        self._master = crowd.master
        self._tasks = tasks
        self.agents = {number: Agent(number, crowd) for number in numbers}
        self._lives: dict[int, asyncio.Task[None]] = {}

    def start(self, within_s: float) -> None:
        for number, agent in self.agents.items():
            life = agent.live(random.uniform(0.0, within_s))
            self._lives[number] = self._tasks.create_task(life)

    def end(self) -> None:
        for number in list(self.agents):
            self.die(number)

    def die(self, number: int) -> None:
        """Lose a host: its connection closes."""
        del self.agents[number]
        self._lives.pop(number).cancel()

    def lose_peer(self, number: int) -> None:
        self.agents[number].lose_peer()

    def commit(self, step: int, generation: int) -> None:
        record = StepRecord(
            step=step,
            loss=1.0,
            grad_norm=1.0,
            tokens=1024,
            samples_digest="0" * 64,
            generation=Generation(generation),
            step_seconds=1.0,
            time=time.time(),
            skipped=False,
        )
        loop = asyncio.get_running_loop()
        for agent in self.agents.values():
            # Delay all but the first senders: in one process agents delay each other, unlike on
            # hosts of their own.
            after_s = 0.0 if not agent.hold_s else random.uniform(0.02, _SPREAD_S)
            loop.call_later(after_s, agent.commit, record)

    def cut(self, count: int) -> None:
        """Cut so many connections at once, as by the restart of a switch."""
        port = int(self._master.rpartition(":")[2])
        all_of_them = psutil.Process().net_connections("tcp")
        ours = [c.fd for c in all_of_them if c.raddr and c.raddr.port == port]
        for descriptor in random.sample(ours, min(count, len(ours))):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


async def serve(hosts: Hosts) -> None:
    """Serve commands from the standard input: {"do": NAME, ARGUMENT: VALUE, ...}."""
    commands: dict[str, Callable[..., None]] = {
        "start": hosts.start,
        "die": hosts.die,
        "lose_peer": hosts.lose_peer,
        "commit": hosts.commit,
        "cut": hosts.cut,
    }
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        command: dict[str, Any] = json.loads(line)
        commands[command.pop("do")](**command)
    hosts.end()


async def run(crowd: Crowd, numbers: Sequence[int]) -> None:
    async with asyncio.TaskGroup() as tasks:
        hosts = Hosts(crowd, numbers, tasks)
        print("{}", flush=True)  # ready to be told something
        await serve(hosts)


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    os.nice(_NICE)
    told = json.loads(sys.argv[1])
    keys = Path(told["keys"])
    authority = Authority((keys / "ca.crt").read_bytes(), read_key((keys / "ca.key").read_bytes()))
    crowd = Crowd(
        master=told["master"], memory_bytes=told["memory_bytes"], authority=authority, news=News()
    )
    asyncio.run(run(crowd, range(told["first"], told["end"], told["step"])))


if __name__ == "__main__":
    main()

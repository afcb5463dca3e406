"""What one master serves: hundreds of agents that speak the real protocol.

    python -m bench.master_scale [--agents 300] [--seconds 60] [--reconnect 150] [--losses 3]

Starts a real `oobleck-master` and, in this process, so many agents with a connection each, which
register over mTLS, send heartbeats, have a worker ready, enter every generation that they are told
of, and report steps, as agents of a job that trains do. Only the training is not there. Then it
looks at

- the master's processor time and memory while the job trains, and how soon it answers: to an
  operator's calls, and to a step record (the acknowledgement waits up to 0.5 s by design, so what
  counts there is the record's line in metrics.jsonl);
- a node that is lost: from its closed stream to the new plan in the hands of each agent;
- many streams that are cut at one moment, and a master that is killed and started again: until all
  agents have a session.

The agents' own work is on the same cores, so times are upper bounds. With 1,000 agents on two cores
they fall silent for longer than the lease, and the job does not get under way.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil

from bench.replan import job_spec, memory_per_worker
from oobleck.agent.session import CHANNEL_OPTIONS, FIRST_RETRY_S
from oobleck.host.credentials import Credentials, read_credentials
from oobleck.host.detection import Detection
from oobleck.host.endpoint import Endpoint
from oobleck.host.messages import PeerLost, PhaseReached, StepRecord
from oobleck.host.pki import Authority, Identity, key_pem, new_key, read_key
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.planner.jobfile import format_job
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto import convert
from oobleck.proto.secure import open_aio_channel
from oobleck.proto.types import (
    PROTOCOL,
    NodeFacts,
    NodeStatus,
    Registration,
    WorkerReport,
    WorkerStatus,
)

#: A connection of its own for every agent, as if each were on a host of its own.
_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_STEP_S = 1.0
_LIMIT_S = 300.0


class Told:
    """What the newest assignment says, read once for all agents: everybody has the same plan."""

    def __init__(self) -> None:
        self._newest = (b"", Generation(0), WorkerId(NodeName(""), 0))

    def plan(self, serialised: bytes) -> tuple[Generation, WorkerId]:
        """Its generation, and the worker with rank 0."""
        if serialised != self._newest[0]:
            plan = convert.read_serialised_plan(serialised)
            self._newest = (serialised, plan.generation, plan.workers[0])
        return self._newest[1:]


class Agent:
    def __init__(self, number: int, memory: int, told: Told) -> None:
        self.name = NodeName(f"n{number:04}")
        self.facts = NodeFacts(
            node=self.name,
            incarnation=Incarnation(os.urandom(8).hex()),
            hostname=self.name,
            address="127.0.0.1",
            pid=10_000 + number,
            worker_slots=1,
            device="cpu",
            memory_per_worker_bytes=memory,
        )
        self.process = Incarnation(os.urandom(8).hex())
        self.status = NodeStatus()
        self.generation = 0
        self.told_at = 0.0
        self.welcomed_at = 0.0
        self.step = 0
        self.is_first = False
        self._told = told
        self._call: Any = None
        self._alive = True
        self._writing = asyncio.Lock()

    async def live(self, address: str, credentials: Credentials) -> None:
        """Sessions, one after the other, with the real agent's waits between them."""
        retry_s = FIRST_RETRY_S
        endpoint = Endpoint(address=address, credentials=credentials)
        async with open_aio_channel(endpoint, (*CHANNEL_OPTIONS, _OWN_CONNECTION)) as channel:
            stub = rpc.ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
            while self._alive:
                before = self.welcomed_at
                with contextlib.suppress(
                    grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError
                ):
                    await self._session(stub)
                if self.welcomed_at > before:
                    retry_s = FIRST_RETRY_S
                if self._alive:
                    await asyncio.sleep(random.uniform(0.0, retry_s))
                    retry_s = min(Detection().longest_retry_s, 2 * retry_s)

    async def _session(self, stub: rpc.ControlStub) -> None:
        self._call = call = stub.Session()
        beating = None
        try:
            registration = Registration(protocol=PROTOCOL, facts=self.facts, status=self.status)
            await self._send(register=convert.register_message(registration))
            async for message in call:
                match message.WhichOneof("body"):
                    case "welcome":
                        self.welcomed_at = time.monotonic()
                        beating = asyncio.create_task(
                            self._beat(message.welcome.detection.heartbeat_s)
                        )
                    case "assignment":
                        await self._assigned(message.assignment)
                    case _:
                        pass
        finally:
            if beating is not None:
                beating.cancel()
            call.cancel()

    def cut(self) -> None:
        """The stream ends; the agent comes again."""
        if self._call is not None:
            self._call.cancel()

    def die(self) -> None:
        self._alive = False
        self.cut()

    async def _send(self, **body: object) -> None:
        assert self._call is not None
        message = pb.AgentMessage(incarnation=self.facts.incarnation, **body)  # type: ignore[arg-type]
        async with self._writing:  # one at a time on a stream
            await self._call.write(message)

    async def _beat(self, heartbeat_s: float) -> None:
        await asyncio.sleep(random.uniform(0.0, heartbeat_s))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._send(status=convert.status_message(self.status))
                await asyncio.sleep(heartbeat_s)

    async def _assigned(self, assignment: pb.Assignment) -> None:
        if not assignment.job_id:
            return
        self.told_at = time.monotonic()
        job_id = JobId(assignment.job_id)
        if not assignment.plan:
            self.generation = 0
            self._now(job_id, 0)
            await self._send(status=convert.status_message(self.status))
            return
        generation, first = self._told.plan(assignment.plan)
        if generation == self.generation:
            return
        self.generation = generation
        self.is_first = first == WorkerId(self.name, 0)
        for phase in ("aborted", "joined", "transferred"):
            reached = PhaseReached(
                generation=generation, phase=phase, committed_step=self.step, redo=False
            )
            await self.report(job_id, reached)
        self._now(job_id, generation)
        await self._send(status=convert.status_message(self.status))

    def _now(self, job_id: JobId, generation: int) -> None:
        worker = WorkerStatus(
            slot=0,
            incarnation=self.process,
            pid=self.facts.pid + 10_000,
            store=f"127.0.0.1:{self.facts.pid}",
            generation=Generation(generation),
            committed_step=self.step,
            data="ab" * 8,
        )
        self.status = NodeStatus(
            job_id=job_id, generation=Generation(generation), workers=(worker,)
        )

    async def report(self, job_id: JobId, what: PhaseReached | PeerLost) -> None:
        report = WorkerReport(
            job_id=job_id,
            slot=0,
            incarnation=self.process,
            generation=Generation(self.generation),
            what=what,
        )
        await self._send(report=convert.report_message(report))

    async def commit(self, job_id: JobId, step: int) -> None:
        """Tell of a step, as the agent of rank 0 does."""
        record = StepRecord(
            step=step,
            loss=1.0,
            grad_norm=1.0,
            tokens=1024,
            samples_digest="0" * 64,
            generation=Generation(self.generation),
            step_seconds=_STEP_S,
            time=time.time(),
            skipped=False,
        )
        await self._send(records=convert.records_message(job_id, [record]))


class Keys:
    """A cluster's authority, as operators make it, and credentials for agents."""

    def __init__(self, folder: Path) -> None:
        oobleck = Path(sys.executable).with_name("oobleck")
        command = [str(oobleck), "pki", "init", "--dir", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.folder = folder
        self.operator = read_credentials(folder / "operator")
        key = read_key((folder / "ca.key").read_bytes())
        self._authority = Authority((folder / "ca.crt").read_bytes(), key)

    def of_agent(self, name: NodeName) -> Credentials:
        key, identity = new_key(), Identity(role="agent", name=name)
        certificate = self._authority.sign(key.public_key(), identity, 86_400.0)
        return Credentials(
            authority=self._authority.certificate, certificate=certificate, key=key_pem(key)
        )


class Master:
    """`oobleck-master` as a process, and its address."""

    def __init__(self, state_dir: Path, keys: Keys) -> None:
        self._state_dir, self._keys = state_dir, keys
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "oobleck.master", "--listen", self.address]
        with (self._state_dir.parent / "master.log").open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--state-dir", str(self._state_dir), "--pki", str(self._keys.folder)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]
        self.seen = psutil.Process(self._process.pid)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def processor_s(self) -> float:
        times = self.seen.cpu_times()
        return float(times.user + times.system)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {_LIMIT_S:.0f} s: {what}")
        await asyncio.sleep(0.002)


class Trainer:
    """Steps go on, told by whichever agent has rank 0."""

    def __init__(self, agents: Sequence[Agent], job_id: JobId, metrics: Path) -> None:
        self._agents, self._job_id, self._metrics = agents, job_id, metrics
        self.step = 0
        self.recorded_s: list[float] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_STEP_S)
            first = next((a for a in self._agents if a.is_first and a._alive), None)
            if first is None or any(
                a.generation not in (0, first.generation) for a in self._agents
            ):
                continue
            self.step += 1
            begun = time.monotonic()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await first.commit(self._job_id, self.step)
            for agent in self._agents:
                agent.step = self.step
                agent._now(self._job_id, agent.generation)
            await until(lambda: self._lines() >= self.step, "the record of a step")
            self.recorded_s.append(time.monotonic() - begun)

    def _lines(self) -> int:
        try:
            with self._metrics.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1024))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["step"]) if lines else 0


def spread(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"median {1e3 * statistics.median(ordered):.1f}, p99 {1e3 * p99:.1f}, "
        f"most {1e3 * ordered[-1]:.1f} ms (of {len(ordered)})"
    )


async def measure_service(
    master: Master, operator: rpc.OperatorStub, job_id: JobId, trainer: Trainer, seconds: float
) -> None:
    trainer.recorded_s.clear()
    before_s, begun = master.processor_s(), time.monotonic()
    calls = []
    while time.monotonic() - begun < seconds:
        await asyncio.sleep(0.2)
        at = time.monotonic()
        await operator.GetJob(pb.JobRequest(job_id=job_id), timeout=30)
        calls.append(time.monotonic() - at)
    share = (master.processor_s() - before_s) / (time.monotonic() - begun)
    print(f"master while the job trains: {share:.2f} of a core, {memory(master)}")
    print(f"  an operator's call: {spread(calls)}")
    if trainer.recorded_s:
        print(f"  a step's record on disk: {spread(trainer.recorded_s)}", flush=True)


def memory(master: Master) -> str:
    return f"{master.seen.memory_info().rss / 2**20:.0f} MiB"


async def measure_loss(agents: list[Agent], job_id: JobId, victim: Agent) -> None:
    """A node is killed; another one's worker sees its closed socket."""
    agents.remove(victim)
    witness = next(agent for agent in agents if agent.generation)
    before = witness.generation
    victim.die()
    begun = time.monotonic()
    lost = PeerLost(generation=Generation(before), step=1, detail="closed")
    await witness.report(job_id, lost)
    members = [agent for agent in agents if agent.generation]
    await until(lambda: all(a.generation > before for a in members), "a new plan for everybody")
    print(f"loss of {victim.name}: new plan at {spread([a.told_at - begun for a in members])}")


async def reconnected(agents: Sequence[Agent], begun: float, what: str) -> None:
    await until(lambda: all(a.welcomed_at > begun for a in agents), f"sessions after {what}")
    print(f"{what}: sessions again after {spread([a.welcomed_at - begun for a in agents])}")


async def run(arguments: argparse.Namespace, scratch: Path) -> None:
    count = arguments.agents
    # Nobody here measures a model.
    spec = replace(job_spec(microbatches=16 * count), profile="estimate")
    memory_bytes = memory_per_worker(spec, 1)
    keys = Keys(scratch / "pki")
    master = Master(scratch / "state", keys)
    told = Told()
    agents = [Agent(number, memory_bytes, told) for number in range(count)]
    credentials = [keys.of_agent(agent.name) for agent in agents]
    begun = time.monotonic()
    lives = [
        asyncio.create_task(agent.live(master.address, own))
        for agent, own in zip(agents, credentials, strict=True)
    ]
    try:
        await reconnected(agents, begun, f"{count} agents start at once")
        channel = open_aio_channel(Endpoint(address=master.address, credentials=keys.operator), ())
        operator = rpc.OperatorStub(channel)  # type: ignore[no-untyped-call]  # generated
        reply = await operator.Submit(
            pb.SubmitRequest(request_id=os.urandom(8).hex(), job=format_job(spec)), timeout=60
        )
        job_id = JobId(reply.job_id)
        submitted = time.monotonic()
        await until(lambda: all(a.generation for a in agents), "the first plan for everybody")
        print(f"first plan with all agents {time.monotonic() - submitted:.1f} s after the job came")
        metrics = scratch / "state" / "jobs" / job_id / "metrics.jsonl"
        trainer = Trainer(agents, job_id, metrics)
        training = asyncio.create_task(trainer.run())
        lives.append(training)
        await until(lambda: trainer.step >= 3, "three steps")
        await measure_service(master, operator, job_id, trainer, arguments.seconds)
        for _ in range(arguments.losses):
            victim = random.choice([a for a in agents[1:] if not a.is_first])
            await measure_loss(agents, job_id, victim)
            at = trainer.step
            await until(lambda at=at: trainer.step >= at + 2, "steps after the loss")  # type: ignore[misc]
        cut = random.sample(agents, min(arguments.reconnect, len(agents)))
        begun, generation = time.monotonic(), agents[0].generation
        for agent in cut:
            agent.cut()
        await reconnected(cut, begun, f"{len(cut)} streams cut at once")
        begun = time.monotonic()
        master.kill()
        await asyncio.to_thread(master.start)
        await reconnected(agents, begun, "kill -9 of the master and a new one")
        await asyncio.sleep(10)
        changes = agents[0].generation - generation
        print(f"changes of the plan by cut streams and the restart: {changes}")
        print(f"master at the end: {memory(master)}")
        await channel.close(None)
    finally:
        for agent in agents:
            agent.die()
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        master.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agents", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the steady part")
    parser.add_argument("--reconnect", type=int, default=150, help="streams cut at one moment")
    parser.add_argument("--losses", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oobleck-") as scratch:
        try:
            asyncio.run(run(arguments, Path(scratch)))
        except BaseException:
            print(Path(scratch, "master.log").read_text()[-20_000:], file=sys.stderr)
            raise


if __name__ == "__main__":
    main()

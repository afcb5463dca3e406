"""What one master serves: a thousand agents that speak the real protocol.

    python -m bench.master_scale [--agents 1000] [--processes 3] [--seconds 60] [--reconnect 500]
                                 [--losses 3]

Starts a real `oobleck-master` and agents in processes of their own (`bench.support.scale_agents`),
each with the real agent's session over its own mTLS connection. They register, send heartbeats once
a second, have a worker ready, enter every plan, and report a step a second, as agents of a job that
trains do; only the training is not there. Then it looks at

- the master's processor time and memory while the job trains, and how soon it answers: to an
  operator's call, and to a step record, which counts as answered when its line is in metrics.jsonl;
- a node that is lost: from its closed connection to the new plan in the hands of each agent;
- a master that is killed and started again, and many connections that are cut at one moment: until
  all agents have a session, and whether the plan changes, for which there is no reason.

Agents run at low priority, but on the same cores: what takes time is an upper bound.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.replan import job_spec, memory_per_worker
from bench.support.daemons import with_parent
from bench.support.ports import choose_address
from bench.support.scale_crowd import Crowd, neighbours, processor_s
from bench.support.scratch import run_folder
from oobleck.core.ids import JobId
from oobleck.core.job.file import format_job
from oobleck.host.detection import Detection
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import read_credentials
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.secure import open_aio_channel

_STEP_S = 1.0
#: Interval of looking at the file of step records.
_LOOK_S = 0.002
#: Pause between two calls of an operator.
_CALL_S = 0.2


class Master:
    """Process of `oobleck-master`, and its address."""

    def __init__(self, scratch: Path) -> None:
        self._log = scratch / "master.log"
        self.keys = scratch / "pki"
        self.state_dir = scratch / "state"
        oobleck = Path(sys.executable).with_name("oobleck")
        command = [str(oobleck), "pki", "init", "--dir", str(self.keys)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.address = choose_address()
        self.start()

    def start(self) -> None:
        command = [*with_parent("oobleck.master"), "--listen", self.address]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--state-dir", str(self.state_dir), "--pki", str(self.keys)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]
        self._seen = psutil.Process(self._process.pid)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def processor_s(self) -> float:
        return processor_s(self._seen)

    @property
    def memory(self) -> str:
        return f"{self._seen.memory_info().rss / 2**20:.0f} MiB"


class Trainer:
    """Source of step records, one a second while all workers are in the newest plan, whatever the
    master does."""

    def __init__(self, crowd: Crowd, metrics: Path) -> None:
        self._crowd, self._metrics = crowd, metrics
        self.step = 0
        #: Seconds from a step's end to its record on the master's disk.
        self.recorded_s: list[float] = []
        self._done_at: dict[int, float] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._train())
            tasks.create_task(self._watch())

    async def _train(self) -> None:
        while True:
            await asyncio.sleep(_STEP_S)
            if self._crowd.trains:
                self.step += 1
                self._done_at[self.step] = time.monotonic()
                self._crowd.tell("commit", step=self.step, generation=self._crowd.generation)

    async def _watch(self) -> None:
        recorded, size = 0, 0
        while True:
            await asyncio.sleep(_LOOK_S)
            with contextlib.suppress(FileNotFoundError):
                before, size = size, self._metrics.stat().st_size
                if size == before:
                    continue
                newest = self._newest()
                now = time.monotonic()
                self.recorded_s += [now - self._done_at[n] for n in range(recorded + 1, newest + 1)]
                recorded = newest

    def _newest(self) -> int:
        """Return the last step with a complete line."""
        with self._metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            whole = file.read().rpartition(b"\n")[0]
        return int(json.loads(whole.splitlines()[-1])["step"]) if whole else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Benchmark: a master, its agents, and a job that trains."""

    master: Master
    crowd: Crowd
    operator: rpc.OperatorStub
    job_id: JobId
    trainer: Trainer

    async def steps(self, count: int, when: str) -> None:
        enough = self.trainer.step + count
        await self.crowd.until(lambda: self.trainer.step >= enough, f"{count} steps {when}")

    async def serve(self, seconds: float) -> None:
        self.trainer.recorded_s.clear()
        before_s, theirs_s = self.master.processor_s(), self.crowd.processor_s()
        begun = time.monotonic()
        calls = []
        while time.monotonic() - begun < seconds:
            await asyncio.sleep(_CALL_S)
            at = time.monotonic()
            await self.operator.GetJob(pb.JobRequest(job_id=self.job_id), timeout=30)
            calls.append(time.monotonic() - at)
        passed_s = time.monotonic() - begun
        share = (self.master.processor_s() - before_s) / passed_s
        theirs = (self.crowd.processor_s() - theirs_s) / passed_s
        each_ms = 1e3 * share / len(self.crowd.alive)
        print(
            f"while the job trains: master {share:.2f} of a core ({each_ms:.2f} ms per agent and "
            f"second), {self.master.memory}; all agents {theirs:.2f} of a core"
        )
        print(f"  an operator's call: {spread(calls)}")
        print(f"  a step's record on disk: {spread(self.trainer.recorded_s)}", flush=True)

    async def lose(self) -> None:
        """Lose a node: its agent's connection ends, and workers with links to its own report a lost
        peer."""
        crowd, before = self.crowd, self.crowd.generation
        ranks = crowd.plans[before]
        victim = random.choice(ranks[1:])
        begun, begun_s = time.monotonic(), self.master.processor_s()
        crowd.die(victim)
        for witness in neighbours(ranks, victim):
            crowd.tell_one(witness, "lose_peer")
        await crowd.until(lambda: crowd.all_told(before), "a new plan for everybody")
        told = crowd.told_at[crowd.generation]
        await self.steps(1, "after the loss")
        took_s = self.master.processor_s() - begun_s
        print(
            f"loss of a node: a new plan with {len(told)} agents after "
            f"{spread([at - begun for at in told.values()])}; "
            f"until the first step the master took {took_s:.2f} s of a core",
            flush=True,
        )

    async def cut(self, count: int) -> None:
        generation = self.crowd.generation
        begun, before = time.monotonic(), (self.master.processor_s(), self.crowd.processor_s())
        self.crowd.cut(count)
        what = f"{count} connections cut at once"
        await sessions(self.master, self.crowd, begun, before, count, what)
        await self._changes(generation)

    async def restart(self) -> None:
        generation = self.crowd.generation
        begun, before = time.monotonic(), (0.0, self.crowd.processor_s())
        self.master.kill()
        await asyncio.to_thread(self.master.start)
        print(f"a new master serves {1e3 * (time.monotonic() - begun):.0f} ms after kill -9")
        count = len(self.crowd.alive)
        await sessions(self.master, self.crowd, begun, before, count, "all agents after that kill")
        await self._changes(generation)

    async def _changes(self, generation: int) -> None:
        """Report how often the plan has changed since that generation, and why; there is no reason
        to."""
        # By then every node that seems lost or stuck has been declared so.
        await asyncio.sleep(Detection().return_s + Detection().stall_s)
        await self.steps(2, "after sessions began again")
        print(f"  changes of the plan: {self.crowd.generation - generation}", flush=True)
        events = self.master.state_dir / "jobs" / self.job_id / "events.jsonl"
        for line in changes(events, generation):
            print(f"    {line}")


def spread(seconds: Sequence[float]) -> str:
    """Format median, 99th percentile and maximum in milliseconds."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return (
        f"median {1e3 * statistics.median(ordered):.1f}, p99 {1e3 * p99:.1f}, "
        f"most {1e3 * ordered[-1]:.1f} ms (of {len(ordered)})"
    )


async def sessions(
    master: Master, crowd: Crowd, begun: float, before: tuple[float, float], count: int, what: str
) -> None:
    """Wait until so many sessions are new since `begun`. `before`: processor seconds of the master
    and of the agents by then."""
    await crowd.until(lambda: len(crowd.welcomed_since(begun)) >= count, f"sessions: {what}")
    print(
        f"{what}: sessions after {spread(crowd.welcomed_since(begun))}; "
        f"the master took {master.processor_s() - before[0]:.1f} s of a core, all agents "
        f"{crowd.processor_s() - before[1]:.1f} s",
        flush=True,
    )


def changes(events: Path, after: int) -> Iterator[str]:
    """Yield the plans after that generation, and their reasons."""
    for line in events.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "reconfigured" and event["to_generation"] > after:
            yield f"generation {event['to_generation']}: {event['rule']}, {event['cause']}"


async def start_job(master: Master, operator: rpc.OperatorStub, crowd: Crowd, job: str) -> JobId:
    """Submit the job, and wait until all agents have its first plan."""
    submitted, before_s = time.monotonic(), master.processor_s()
    request = pb.SubmitRequest(request_id=os.urandom(8).hex(), job=job)
    reply = await operator.Submit(request, timeout=60)
    await crowd.until(lambda: crowd.all_told(0), "the first plan for everybody")
    last_s = max(crowd.told_at[crowd.generation].values()) - submitted
    print(
        f"first plan, of {len(crowd.plans[crowd.generation])} nodes, with all of them {last_s:.1f} "
        f"s after the job came; it took {master.processor_s() - before_s:.1f} s of a core",
        flush=True,
    )
    return JobId(reply.job_id)


async def run(arguments: argparse.Namespace, scratch: Path) -> None:
    count = arguments.agents
    # Nobody here measures a model.
    spec = replace(job_spec(microbatches=16 * count), profile="estimate")
    master, crowd = Master(scratch), Crowd(count, arguments.processes)
    operators = Endpoint(
        address=master.address, credentials=read_credentials(master.keys / "operator")
    )
    async with contextlib.AsyncExitStack() as ends:
        ends.callback(master.kill)
        ends.push_async_callback(crowd.end)
        await crowd.start(master.address, memory_per_worker(spec, 1), master.keys, scratch)
        print(f"{count} agents in {arguments.processes} processes, on {os.cpu_count()} cores")
        begun, before = time.monotonic(), (master.processor_s(), crowd.processor_s())
        crowd.tell("start", within_s=arguments.start_within)
        what = f"all agents start within {arguments.start_within:g} s"
        await sessions(master, crowd, begun, before, count, what)
        channel = await ends.enter_async_context(open_aio_channel(operators, ()))
        operator = rpc.OperatorStub(channel)  # type: ignore[no-untyped-call]  # generated
        job_id = await start_job(master, operator, crowd, format_job(spec))
        trainer = Trainer(crowd, master.state_dir / "jobs" / job_id / "metrics.jsonl")
        bench = Bench(master=master, crowd=crowd, operator=operator, job_id=job_id, trainer=trainer)
        training = asyncio.create_task(trainer.run())
        ends.callback(training.cancel)
        await bench.steps(3, "after the start")
        await bench.serve(arguments.seconds)
        for _ in range(arguments.losses):
            await bench.lose()
            await bench.steps(2, "after the loss")
        await bench.restart()
        await bench.cut(min(arguments.reconnect, len(crowd.alive)))
        print(f"master at the end: {master.memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=3, help="that the agents live in")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the steady part")
    parser.add_argument("--reconnect", type=int, default=500, help="connections cut at one moment")
    parser.add_argument("--losses", type=int, default=3)
    parser.add_argument(
        "--start-within", type=float, default=5.0, help="seconds in which all agents are started"
    )
    arguments = parser.parse_args()
    with run_folder() as scratch:
        try:
            asyncio.run(run(arguments, scratch))
        except BaseException:
            for log in sorted(scratch.glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-20_000:]}", file=sys.stderr)
            raise


if __name__ == "__main__":
    main()

"""Copies of a state directory that a master writes to, made at random moments, are whole."""

import asyncio
import contextlib
import json
import random
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from oobleck.host.detection import Detection
from oobleck.host.storage.backup import read_summary
from oobleck.master.config import MasterConfig
from oobleck.master.loop import Master
from oobleck.master.state.job import ENDED
from oobleck.master.storage.journal import Journal
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support import commands, loops
from support.jobs import job_text, record
from support.live_agent import FakeAgent, connected, started, told
from support.masters import MasterProcess, master, operator

_KEPT = 10
#: Between two jobs, and two steps: what is looked at has a part of the processor.
_PAUSE_S = 0.02
#: Flags of the master: it compacts the journal every dozen of jobs, and knows so many that ended.
EAGER = ("--compact-bytes", "5000", "--keep-jobs", str(_KEPT))


@dataclass(kw_only=True)
class Promised:
    """What the head had said to be on disk at some moment."""

    training: str
    step: int
    submitted: list[str]
    cancelled: list[str]


@dataclass
class Load:
    training: str
    agents: list[FakeAgent]
    #: Ids of jobs, in the order in which the head told them.
    submitted: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def promised(self) -> Promised:
        return Promised(
            training=self.training,
            step=max(agent.acks.get(self.training, 0) for agent in self.agents),
            submitted=list(self.submitted),
            cancelled=list(self.cancelled),
        )

    async def until(self, jobs: int) -> None:
        """Return when so many more jobs have come and gone."""
        wanted = len(self.cancelled) + jobs
        while len(self.cancelled) < wanted:
            self._more.clear()
            await self._more.wait()

    async def _jobs(self, control: rpc.OperatorStub) -> None:
        for number in range(10**6):
            request = pb.SubmitRequest(request_id=f"s{number}", job=job_text())
            self.submitted.append((await control.Submit(request)).job_id)
            await control.CancelJob(
                pb.CancelRequest(request_id=f"c{number}", job_id=self.submitted[-1])
            )
            self.cancelled.append(self.submitted[-1])
            self._more.set()
            await asyncio.sleep(_PAUSE_S)

    async def _steps(self) -> None:
        for step in range(1, 10**6):
            told(self.agents, self.training, record(step, 1, time.time()))
            line = pb.LogLines(job_id=self.training, slot=0, lines=[f"step {step}"])
            self.agents[0].send(log=line)
            await asyncio.sleep(_PAUSE_S)


@contextlib.asynccontextmanager
async def busy(address: str) -> AsyncIterator[Load]:
    async with connected(address, 4) as agents, operator(address) as control:
        load = Load(await started(agents, control, job_text(10**6)), agents)
        tasks = [
            asyncio.create_task(load._jobs(control)),
            asyncio.create_task(load._steps()),
        ]
        try:
            yield load
            assert not any(task.done() for task in tasks), "the load is there to the end"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def check(state_dir: Path, promised: Promised) -> None:
    """Start what a master has on a copy, and find all that was promised before it was made."""
    config = MasterConfig(listen="127.0.0.1:0", state_dir=state_dir, timing=Detection())
    with contextlib.closing(Journal(state_dir / "journal.log")) as journal:
        jobs = {str(job_id): job for job_id, job in Master(config, journal).state.jobs.items()}
    ended = [job_id for job_id, job in jobs.items() if job.state in ENDED]
    for job_id in promised.submitted:
        forgotten = len(ended) == _KEPT and _number(job_id) < min(map(_number, ended))
        assert forgotten or job_id in jobs, job_id
        assert forgotten or job_id not in promised.cancelled or job_id in ended, job_id
    folder = state_dir / "jobs" / promised.training
    steps = numbers(folder / "metrics.jsonl", "step")
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= promised.step


def _number(job_id: str) -> int:
    return int(job_id.rpartition("-")[2])


def numbers(path: Path, key: str) -> list[int]:
    """Return the value of `key` in each line of the file."""
    return [json.loads(line)[key] for line in path.read_text().splitlines()]


_COPIES = 12
_SEED = 7
#: Files that stand in for others until they are whole, so `cp` may find them gone.
_PASSING = ("journal.log.new", "journal.old.new", ".partial", "code/coming-")


def _cp(state: Path, copy: Path) -> None:
    done = subprocess.run(["cp", "-a", str(state), str(copy)], capture_output=True, text=True)
    others = [
        line for line in done.stderr.splitlines() if not any(name in line for name in _PASSING)
    ]
    assert others == []


def _backup(address: str, copy: Path) -> None:
    done = commands.run("backup", str(copy), "--master", address)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{copy}: ")


def _at_random_moments(tmp_path: Path, make: str) -> list[Path]:
    """Return the copies, each of which has what was promised when it was begun."""
    moments, copies, snapshots = random.Random(_SEED), [], set[float]()
    state = tmp_path / "state"

    async def test(running: MasterProcess) -> None:
        async with busy(running.address) as load:
            for number in range(_COPIES):
                await load.until(moments.randrange(6))
                await asyncio.sleep(moments.uniform(0, 0.05))
                promised, copy = load.promised(), tmp_path / str(number)
                if make == "cp":
                    await asyncio.to_thread(_cp, state, copy)
                else:
                    await asyncio.to_thread(_backup, running.address, copy)
                with suppress(FileNotFoundError):  # before the first
                    snapshots.add((state / "journal.old").stat().st_mtime)
                await asyncio.to_thread(check, copy, promised)
                copies.append(copy)

    with master(state, *EAGER) as running:
        loops.run(test(running), limit_s=480)
    assert len(snapshots) > 1, ("the", snapshots)  # " journal was compacted between the copies"
    return copies


def test_a_live_state_directory_may_be_copied_by_cp(tmp_path: Path) -> None:
    for copy in _at_random_moments(tmp_path, "cp"):
        for folder in (copy / "jobs").iterdir():
            found = numbers(folder / "events.jsonl", "id")
            assert found == sorted(set(found)), folder


def test_a_backup_is_one_consistent_point_under_load(tmp_path: Path) -> None:
    for copy in _at_random_moments(tmp_path, "backup"):
        summary = read_summary(copy)
        for folder in (copy / "jobs").iterdir():
            found = numbers(folder / "events.jsonl", "id")
            assert found == list(range(1, len(found) + 1)), folder
            assert '"journal_cut"' not in (folder / "events.jsonl").read_text()
        assert summary.sequence > 0

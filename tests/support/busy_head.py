"""A master under load: jobs come and go, the journal is compacted, one job trains and prints."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from oobleck.host.detection import Detection
from oobleck.master.config import MasterConfig
from oobleck.master.loop import Master
from oobleck.master.state.job import ENDED
from oobleck.master.storage.journal import Journal
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support.crowd import connected, job_text, started
from support.fake_agent import FakeAgent, operator, told
from support.scenario import record

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

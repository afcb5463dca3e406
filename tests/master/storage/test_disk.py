"""A state directory that is full: a real master on a small disk of its own."""

import asyncio
import contextlib
import json
import resource
import subprocess
from collections.abc import Awaitable, Iterator
from pathlib import Path

import grpc
import pytest

from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from support import loops
from support.jobs import record
from support.live_agent import FakeAgent, told
from support.masters import DEADLINE_S, MasterProcess, master, operator

JOB = (
    "name: demo\nmodel: {kind: gpt, layers: 6, hidden: 32, heads: 2, sequence_length: 16}\n"
    "data: {text: [/nowhere]}\nprofile: estimate\nfault_tolerance: 1\n"
    "training: {steps: 30, global_batch: 16, microbatch: 2}\n"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 12 MiB, in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a disk here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


async def problem(control: rpc.OperatorStub, wanted: bool) -> str:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = (await control.ListJobs(pb.ListJobsRequest())).problem
            nodes = (await control.ListNodes(pb.ListNodesRequest())).problem
            if bool(found) is wanted and bool(nodes) is wanted:
                return str(found)
            await asyncio.sleep(0.05)


async def known(control: rpc.OperatorStub, job_id: str, step: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for status in control.WatchJob(pb.JobRequest(job_id=job_id)):
            if status.committed_step >= step:
                return


def test_a_full_disk_refuses_new_jobs_and_stops_none(small_disk: Path) -> None:
    state = small_disk / "state"

    async def test(address: str) -> None:
        agents = [FakeAgent(f"n{number}") for number in range(1, 4)]
        for agent in agents:
            await agent.connect(address)
        try:
            async with operator(address) as control:
                await play(agents, control)
        finally:
            for agent in agents:
                await agent.disconnect()

    async def play(agents: list[FakeAgent], control: rpc.OperatorStub) -> None:
        job_id = (await control.Submit(pb.SubmitRequest(request_id="a", job=JOB))).job_id
        for agent in agents:
            await agent.until(lambda a=agent: a.assignments and a.assignments[-1].job_id)
            agent.workers()
        for agent in agents:
            await agent.until(lambda a=agent: a.planned == 1)
            agent.workers(1)
        told(agents, job_id, *(record(step, 1, float(step)) for step in range(1, 11)))
        await agents[0].until(lambda: agents[0].acks.get(job_id) == 10)

        fill(small_disk / "filler")
        text = await problem(control, True)
        assert "new jobs are refused, those that run go on" in text
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.Submit(pb.SubmitRequest(request_id="b", job=JOB))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == text
        again = await control.Submit(pb.SubmitRequest(request_id="a", job=JOB))
        assert again.job_id == job_id

        # Decisions go on, and steps are taken without being acknowledged.
        lost, *others = reversed(agents)
        await lost.disconnect()
        for agent in others:
            agent.lost_peer(1)
        for agent in others:
            await agent.until(lambda a=agent: a.planned == 2)
            agent.workers(2)
        told(others, job_id, *(record(step, 2, float(step)) for step in range(11, 21)))
        await known(control, job_id, 20)
        assert others[0].acks.get(job_id, 0) <= 10

        (small_disk / "filler").unlink()
        await problem(control, False)
        await others[0].until(lambda: others[0].acks.get(job_id) == 20)
        assert (await control.Submit(pb.SubmitRequest(request_id="b", job=JOB))).job_id != job_id

    with master(state) as running:
        loops.run(test(running.address))
    job = state / "jobs" / "demo-1"
    steps = [json.loads(line)["step"] for line in (job / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))
    events = [json.loads(line) for line in (job / "events.jsonl").read_text().splitlines()]
    assert [event["id"] for event in events] == list(range(1, len(events) + 1))
    assert [e["event"] for e in events].count("incident") == 1
    assert "Traceback" not in running.errors.read_text()


def test_where_the_journal_takes_nothing_requests_are_refused_and_may_be_repeated(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"

    async def refused(call: Awaitable[object]) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "cannot take more" in (failed.value.details() or "")

    async def play(running: MasterProcess) -> None:
        agent = FakeAgent("n1")
        await agent.connect(running.address)
        drain = pb.DrainNodesRequest(request_id="d", nodes=["n1"], reason="a new fan")
        try:
            async with operator(running.address) as control:
                most = (state / "journal.log").stat().st_size
                limits = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (most, limits[1]))
                await refused(control.DrainNodes(drain))
                await refused(control.UndrainNode(pb.UndrainNodeRequest(request_id="u", node="n1")))
                resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, limits)
                await problem(control, False)
                (node,) = (await control.DrainNodes(drain)).nodes
                assert (node.state, node.reason) == ("drained", "a new fan")
        finally:
            await agent.disconnect()

    with master(state) as running:
        loops.run(play(running))
    journal = (state / "journal.log").read_text()
    assert journal.count("NodeDrainRequested") == 1
    assert "NodeUndrained" not in journal

"""Whatever operators and agents call things, the master writes nowhere but in its folder."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from oobleck.proto import control_pb2 as pb
from support import loops
from support.live_agent import FakeAgent
from support.masters import MasterProcess, master, operator

JOB = """
name: {name}
model: {{kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}}
data: {{text: [/dev/null]}}
training: {{steps: 20, global_batch: 4}}
"""
HOSTILE = [
    "..",
    ".",
    "../../outside",
    "/tmp/outside",
    "a/../../outside",
    "a/b",
    "a\\b",
    "a b",
    "UPPER",
    "-rf",
    ".hidden",
    "a\x00b",
    "a\nb",
    "ä",
    "\u0430",  # a Cyrillic a
    "a\u202eb",
    "%2e%2e",
    "x" * 64,
    "",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paths")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[MasterProcess]:
    with master(folder / "state") as process:
        yield process


@pytest.fixture
def outside(folder: Path, running: MasterProcess) -> Iterator[None]:
    def there() -> set[Path]:
        inside = {path for path in (folder / "state").rglob("*") if path.suffix != ".log"}
        return {*folder.iterdir(), *Path("/tmp").glob("outside*"), *inside}

    before = there()
    yield
    assert there() == before


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_hostile_name_is_refused_everywhere(running: MasterProcess, name: str) -> None:
    async def codes() -> list[grpc.StatusCode]:
        found = []
        async with operator(running.address) as control:
            asked = [
                control.Submit(pb.SubmitRequest(request_id="r", job=JOB.format(name=repr(name)))),
                control.GetJob(pb.JobRequest(job_id=name)),
                control.CancelJob(pb.CancelRequest(request_id="r", job_id=name)),
                control.GetProfile(pb.JobRequest(job_id=name)),
                control.GetPlanning(pb.JobRequest(job_id=name)),
                control.DrainNodes(pb.DrainNodesRequest(request_id="r", nodes=[name])),
            ]
            for call in asked:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                found.append(refused.value.code())
            for stream in (
                *([control.Events(pb.EventsRequest(job_id=name))] if name else []),  # the cluster's
                control.Metrics(pb.MetricsRequest(job_id=name)),
                control.Logs(pb.LogsRequest(job_id=name)),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await anext(aiter(stream))
                found.append(refused.value.code())
        return found

    known = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    found = loops.run(codes())
    assert set(found) <= known, found
    assert found[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_an_agent_of_a_hostile_name_is_refused(running: MasterProcess, name: str) -> None:
    async def register() -> None:
        agent = FakeAgent(name)
        try:
            await agent.connect(running.address)
            assert agent.ended is not None, "it was let in"
            assert agent.ended.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "is not allowed" in (agent.ended.details() or "")
        finally:
            await agent.disconnect()

    loops.run(register())


@pytest.mark.parametrize(
    "body",
    [
        {"log": pb.LogLines(job_id="../outside", slot=0, lines=["x"])},
        {"log": pb.LogLines(job_id="nobodys-1", slot=0, lines=["x"])},
        {"log": pb.LogLines(job_id="nobodys-1", slot=7, lines=["x"])},
        {"records": pb.StepRecords(job_id="../outside", records=[pb.StepRecord(step=1)])},
        {"records": pb.StepRecords(job_id="nobodys-1", records=[pb.StepRecord(step=1)])},
        {"status": pb.NodeStatus(job_id="/tmp/outside")},
    ],
    ids=str,
)
@pytest.mark.usefixtures("outside")
def test_what_an_agent_tells_of_no_job_of_ours_is_written_nowhere(
    running: MasterProcess, body: dict[str, object]
) -> None:
    async def tell() -> None:
        agent = FakeAgent(f"n{os.getpid()}")
        await agent.connect(running.address)
        agent.send(**body)
        # It is handled in order: once a later wrong one has ended the session, this is done.
        agent.send(report=b"")
        await agent.until(lambda: agent.ended)
        await agent.disconnect()

    loops.run(tell())

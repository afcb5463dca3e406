"""Every request that changes something may be repeated: it happens once, and the answer stays."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from simulation.drill import TIMING
from simulation.network import Context
from simulation.world import World

from oobleck.core.ids import NodeName
from oobleck.core.job.file import format_job
from oobleck.master.api.operator_service import OperatorService
from oobleck.proto import control_pb2 as pb
from support.jobs import job_spec

#: Requests of the operator's service that only look.
_LOOKS = {
    "ListJobs", "GetJob", "WatchJob", "GetProfile", "GetPlanning", "ListNodes", "Events", "Metrics",
    "GetTimeline", "Logs", "Examine", "Backup",
}  # fmt: skip
#: Puts a file on the disk by the hash of its content: once or twice is the same.
_BY_CONTENT = {"PutCode"}
_JOB = format_job(job_spec("demo", steps=20, f=0, min_nodes=1, checkpoint=1))
_REQUESTS: dict[str, Any] = {
    "Submit": pb.SubmitRequest(request_id="r", job=_JOB),
    "SaveCheckpoint": pb.SaveCheckpointRequest(request_id="r", job_id="demo-1"),
    "DrainNodes": pb.DrainNodesRequest(
        request_id="r", nodes=["n1", "n1"], reason="fans", force=True
    ),
    "UndrainNode": pb.UndrainNodeRequest(request_id="r", node="n1"),
    "ForgetNode": pb.ForgetNodeRequest(request_id="r", node="n1"),
    "CancelJob": pb.CancelRequest(request_id="r", job_id="demo-1"),
}
#: About jobs of another head, which `heads` plays.
_OF_HELD_JOBS = {"AdoptJob", "CancelUnknownJob"}
#: What each puts on the disk.
_FACTS = {
    "Submit": "JobSubmitted",
    "SaveCheckpoint": "CheckpointRequested",
    "DrainNodes": "NodeDrainRequested",
    "UndrainNode": "NodeUndrained",
    "ForgetNode": "NodeForgotten",
    "CancelJob": "JobCancelRequested",
}


def test_every_request_that_changes_something_has_an_id() -> None:
    service = pb.DESCRIPTOR.services_by_name["Operator"]
    changing = {m.name: m for m in service.methods if m.name not in _LOOKS | _BY_CONTENT}
    tested = set(_REQUESTS) | _OF_HELD_JOBS
    assert set(changing) == tested, "a new request is tested here, or only looks"
    for method in changing.values():
        assert "request_id" in method.input_type.fields_by_name


@pytest.mark.parametrize("name", sorted(_REQUESTS))
@pytest.mark.parametrize("restarted", [False, True])
def test_a_repeated_request_is_the_same_request(name: str, restarted: bool, tmp_path: Path) -> None:
    """Also of another master on the same journal, and when the world has changed since."""
    world = World(1, tmp_path, TIMING, 1000.0)

    async def ask(request: Any, method: str = name) -> Any:
        master = world.master
        assert master is not None
        call: Callable[..., Awaitable[Any]] = getattr(OperatorService(master.core), method)
        return await asyncio.wait_for(master.process.spawn(_awaited(call(request, Context()))), 60)

    async def play() -> None:
        world.start_master()
        world.start_agent(NodeName("n1"), 1)
        if name != "Submit":
            await ask(pb.SubmitRequest(request_id="first", job=_JOB), "Submit")
        await asyncio.sleep(4.0)
        if name == "ForgetNode":  # that of a job, or with an agent, is kept
            await ask(pb.CancelRequest(request_id="second", job_id="demo-1"), "CancelJob")
            world.lose_host(NodeName("n1"))
            await asyncio.sleep(20.0)
        first = await ask(_REQUESTS[name])
        facts = world.watch.facts[_FACTS[name]]
        if restarted:
            assert world.master is not None
            world.master.process.kill()
            world.start_master()
        again = await ask(_REQUESTS[name])
        assert world.watch.facts[_FACTS[name]] == facts > 0
        if name in ("Submit", "SaveCheckpoint"):
            assert again == first
            # Another id is another request.
            other = type(_REQUESTS[name])()
            other.CopyFrom(_REQUESTS[name])
            other.request_id = "other"
            assert await ask(other) != first

    try:
        world.loop.run_until_complete(play())
    finally:
        world.end()


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call

"""A worker's process whose launch cannot be completed."""

import asyncio
import signal
import subprocess
import sys
from unittest.mock import create_autospec

import pytest

from oobleck.agent.processes.children import Listener, WorkerProcess
from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Launch
from support import loops
from support.scripted_master import job
from support.waiting import PATIENCE_S


def test_a_process_that_does_not_get_its_launch_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else it would wait for ever, and nobody would know why."""
    launch = Launch(
        worker=WorkerId(NodeName("n1"), 0),
        job_id=JobId("job-1"),
        job=job("a"),
        address="127.0.0.1",
        agent_pid=0,
        device_kind="cpu",
    )

    async def complete(launch: Launch) -> Launch:
        raise RuntimeError("a disk of its own kind")

    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)

    async def run() -> int:
        listener = create_autospec(Listener, instance=True)
        process = WorkerProcess(WorkerId(NodeName("n1"), 0), Incarnation("a"), listener)
        process.forked(child.pid)
        serving = asyncio.create_task(process.serve(launch, complete))
        try:
            return await asyncio.to_thread(child.wait, PATIENCE_S)
        finally:
            child.kill()
            process.close_theirs()
            await serving
            process.release()

    with child:
        assert loops.run(run()) == -signal.SIGKILL
    assert "a disk of its own kind" in caplog.text

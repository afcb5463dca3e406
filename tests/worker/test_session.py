"""What a worker sets up before it is ready."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oobleck.core.ids import JobId
from oobleck.core.messages import Launch, ToWorker
from oobleck.host.ipc.channel import Channel
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.session import Session
from support.director import worker_named


@pytest.mark.parametrize("wanted", ["high", "highest"])
def test_products_are_as_exact_as_the_job_says(make_job, tmp_path: Path, wanted: str) -> None:
    """It is set before anything is computed: here the session ends when it looks at the output."""
    (tmp_path / "file").touch()
    job = replace(make_job(float32_matmul=wanted), output=str(tmp_path / "file" / "no"))
    launch = Launch(
        worker=worker_named("a"),
        job_id=JobId("job-1"),
        job=job,
        address="127.0.0.1",
        agent_pid=0,
        device_kind="cpu",
    )
    before = torch.get_float32_matmul_precision()
    own, agents = socket.socketpair()
    with own, agents:
        try:
            with pytest.raises(JobError, match="output"):
                Session(launch, Control(Channel(own, ToWorker)))
            assert torch.get_float32_matmul_precision() == wanted
        finally:
            torch.set_float32_matmul_precision(before)

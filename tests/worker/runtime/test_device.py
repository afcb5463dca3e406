"""Where a worker computes: which GPU it sees, and which CPUs it runs on."""

import os
from collections.abc import Iterator

import msgspec
import pytest

from oobleck.core.ids import JobId
from oobleck.core.messages import Launch
from oobleck.worker.runtime.device import take_place
from support.director import worker_named
from support.scripted_master import job

LAUNCH = Launch(
    worker=worker_named("a"),
    job_id=JobId("job-1"),
    job=job("demo"),
    address="127.0.0.1",
    agent_pid=0,
    device_kind="cuda H100",
    device="cuda:0",
)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def test_a_worker_sees_its_own_gpu_and_runs_near_it() -> None:
    near = min(os.sched_getaffinity(0))
    take_place(msgspec.structs.replace(LAUNCH, visible="GPU-12ab", cpus=(near, 4095)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-12ab"
    assert os.sched_getaffinity(0) == {near}


def test_where_its_agent_may_run_on_none_that_are_near_it_runs_where_it_may() -> None:
    before = os.sched_getaffinity(0)
    for cpus in ((), (4095,)):
        take_place(msgspec.structs.replace(LAUNCH, cpus=cpus))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert os.sched_getaffinity(0) == before

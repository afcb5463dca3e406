"""Where a worker computes: which GPU it sees, and which CPUs it runs on."""

import os
from collections.abc import Iterator

import msgspec
import pytest
import torch

from oobleck.core.ids import JobId
from oobleck.core.messages import Launch
from oobleck.worker.runtime.device import (
    board_name,
    clock_of,
    find_gpus,
    has_queue,
    mark_queued,
    no_float8,
    take_place,
)
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


def test_a_build_of_torch_for_rocm_has_gpus_by_the_same_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    found = find_gpus()
    assert found.cuda == "6.4.43482"
    assert "built without CUDA" not in found.problem, "it is asked for its GPUs"


def test_a_cpu_has_no_queue() -> None:
    cpu = torch.device("cpu")
    assert not has_queue(cpu)
    assert has_queue(torch.device("cuda:0"))
    assert mark_queued(cpu) is None
    assert clock_of(cpu) is None
    assert board_name(cpu) == "cpu"


@pytest.mark.parametrize(
    ("capability", "hip", "why"),
    [
        ((9, 0), None, ""),
        ((8, 9), None, ""),
        ((8, 0), None, "a board has none (compute capability 8.0, at least 8.9)"),
        ((9, 4), "7.0", "this version has none for a board"),
    ],
)
def test_gpus_without_products_in_float8_are_told(
    capability: tuple[int, int], hip: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a board")
    monkeypatch.setattr(torch.version, "hip", hip)
    assert no_float8(torch.device("cuda:0")) == why
    assert no_float8(torch.device("cpu")) == ""

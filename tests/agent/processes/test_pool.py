"""What a worker is launched with: of the node's GPUs each gets the next one."""

import asyncio
from typing import Any

import pytest

from oobleck.agent.config import AgentConfig
from oobleck.agent.events import ForkRequested, ForkWorker
from oobleck.agent.processes import pool as pools
from oobleck.agent.processes.children import Complete
from oobleck.agent.processes.pool import ProcessPool
from oobleck.agent.wheels import WheelCache
from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.messages import Launch
from oobleck.host.gpu.devices import Gpu
from oobleck.host.system.environment import Environment
from support import loops
from support.scripted_master import job


class Process:
    """In place of a worker: remembers its launch."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, listener: object) -> None:
        self.worker, self.slot, self.incarnation = worker, worker.slot, incarnation
        self.launch: Launch | None = None

    async def serve(self, launch: Launch, complete: Complete | None = None) -> None:
        self.launch = await complete(launch) if complete else launch


class Warm:
    def fork(self, wanted: object, process: Process) -> None: ...


def pool_of(gpus: tuple[Gpu, ...], slots: int) -> tuple[ProcessPool, list[Any]]:
    """And the processes that it starts."""
    config = AgentConfig(
        master="master:1",
        name=NodeName("n1"),
        hostname="host",
        worker_slots=slots,
        gpus=gpus,
        address="10.0.0.1",
        memory_per_worker_bytes=1 << 30,
        faults=(),
        warm_command=(),
        environment={},
    )
    started: list[Any] = []

    def start(*arguments: Any) -> Any:
        started.append(Process(*arguments))
        return started[-1]

    pool = ProcessPool(
        config,
        Environment(),
        None,  # type: ignore[arg-type]  # nothing is told
        start_warm=lambda listener: Warm(),  # type: ignore[arg-type,return-value]
        start_worker=start,
        wheels=WheelCache(None),
    )
    pool.warm = Warm()  # type: ignore[assignment]
    return pool, started


def fork_of(slot: int) -> ForkWorker:
    return ForkWorker(
        slot=slot,
        job_id=JobId("demo-1"),
        job=job("demo"),
        passed=False,
        ready_by=120.0,
        faults=(),
        silence_s=1.0,
    )


async def launched(gpus: tuple[Gpu, ...], slots: int) -> list[Launch]:
    pool, started = pool_of(gpus, slots)
    async with asyncio.TaskGroup() as tasks:
        for slot in range(slots):
            pool.perform(fork_of(slot), tasks)
    assert {process.launch.ready_by for process in started} == {120.0}
    return [process.launch for process in started]


def test_each_worker_sees_the_next_gpu_alone_and_runs_near_it() -> None:
    near = {"2": (0, 1), "GPU-12ab": (8, 9)}
    gpus = tuple(
        Gpu(name="H100", uuid=name, memory_bytes=80 << 30, visible=name, cpus=cpus)
        for name, cpus in near.items()
    )
    found = loops.run(launched(gpus, 3))
    assert [(each.visible, each.cpus) for each in found] == [
        ("2", (0, 1)),
        ("GPU-12ab", (8, 9)),
        ("2", (0, 1)),
    ]
    assert {(each.device, each.device_kind) for each in found} == {
        ("cuda:0", "cuda H100, shared by 2")
    }


def test_workers_on_cpus_run_anywhere() -> None:
    (found,) = loops.run(launched((), 1))
    assert (found.device, found.visible, found.cpus) == ("cpu", "", ())


GPU = Gpu(name="H100", uuid="GPU-1", memory_bytes=80 << 30, visible="0")


async def after_an_early_end(gpus: tuple[Gpu, ...], ends: str) -> list[bool]:
    """Whether the process in the place of one whose end was told early has its launch at once, and
    once that one has ended, where it does."""
    pool, started = pool_of(gpus, 1)
    found = []
    async with asyncio.TaskGroup() as tasks:
        pool.perform(fork_of(0), tasks)
        started[0].pid = 7
        pool.is_ending(started[0])
        asked = pool.perform(fork_of(0), tasks)
        await asyncio.sleep(0.02)
        found.append(started[1].launch is not None)
        assert isinstance(asked, ForkRequested)
        assert asked.fetches == (not found[0]), "it has as long to get ready from then on"
        pool.has_ended(8)
        if ends == "ends":
            pool.has_ended(7)
        elif ends == "untold":
            pool.warm_has_ended()
            pool.warm = Warm()  # type: ignore[assignment]
    found.append(started[1].launch is not None)
    async with asyncio.TaskGroup() as tasks:
        pool.perform(fork_of(0), tasks)
        await asyncio.sleep(0.02)
        assert started[2].launch is not None, "nobody waits for it twice"
    return found


def test_a_gpu_is_free_before_another_process_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loops.run(after_an_early_end((GPU,), ends="ends")) == [False, True]
    assert loops.run(after_an_early_end((GPU,), ends="untold")) == [False, True]
    monkeypatch.setattr(pools, "FREED_S", 0.05)
    assert loops.run(after_an_early_end((GPU,), ends="never")) == [False, True], "not for ever"


def test_a_host_frees_memory_faster_than_it_is_taken() -> None:
    assert loops.run(after_an_early_end((), ends="ends")) == [True, True]

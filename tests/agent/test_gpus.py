"""Which GPUs of its host a node's workers use, and where they run."""

from collections.abc import Sequence

import pytest

from oobleck.agent import gpus
from oobleck.host.gpu.devices import Gpu, GpuReport
from oobleck.planner.profile.memory import GPU_CONTEXT_BYTES, gpu_reserve_bytes

TWO = tuple(
    Gpu(name="H100", uuid=f"u{number}", memory_bytes=1, bus=f"bus {number}", visible=str(number))
    for number in range(2)
)


@pytest.mark.parametrize(
    ("option", "workers", "used"),
    [(None, None, 1), (None, 1, 1), (None, 2, 2), (None, 5, 2), ("0,1", None, 2), ("0,1", 1, 1)],
)
def test_only_the_gpus_that_workers_get_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, option: str | None, workers: int | None, used: int
) -> None:
    looked_at: list[Sequence[Gpu]] = []
    monkeypatch.setattr(gpus, "find_gpus", lambda environment, names: GpuReport(gpus=TWO))
    monkeypatch.setattr(gpus, "check_unused", looked_at.append)
    found = gpus.find({}, option, workers, shared=False)
    assert [gpu.visible for gpu in found.gpus] == ["0", "1"][:used]
    assert looked_at == [TWO[:used]]


@pytest.mark.parametrize(
    ("measured", "shared", "expected"),
    [
        (500 << 20, False, 756 << 20),
        # Others' memory may be in it, or is.
        (500 << 20, True, GPU_CONTEXT_BYTES),
        (70 << 30, False, GPU_CONTEXT_BYTES),
        (0, False, GPU_CONTEXT_BYTES),
    ],
)
def test_what_a_worker_takes_before_any_model_is_measured_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, measured: int, shared: bool, expected: int
) -> None:
    report = GpuReport(gpus=TWO, context_bytes=measured)
    monkeypatch.setattr(gpus, "find_gpus", lambda environment, names: report)
    monkeypatch.setattr(gpus, "check_unused", lambda used: None)
    found = gpus.find({}, None, 1, shared=shared)
    assert found.context_bytes == expected
    gpu = [Gpu(name="H100", uuid="0", memory_bytes=80 << 30)]
    left = gpus.default_memory(1, gpu, found.context_bytes)
    assert left == (80 << 30) - gpu_reserve_bytes(1, expected)


def near(*cpus: Sequence[int]) -> list[Gpu]:
    return [
        Gpu(name="H100", uuid=str(number), memory_bytes=1, cpus=tuple(each))
        for number, each in enumerate(cpus)
    ]


@pytest.mark.parametrize(
    ("cpus", "workers", "allowed", "told"),
    [
        ([range(4), range(4)], 2, range(8), [(0, 1, 2, 3), (0, 1, 2, 3)]),
        ([range(4), range(4, 8)], 4, range(8), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ([range(32), range(32, 64)], 2, range(33), [tuple(range(32)), ()]),
        ([range(4)], 3, range(8), [()]),
        ([()], 1, range(8), [()]),
    ],
)
def test_workers_run_near_their_gpu_where_there_is_room_for_them(
    cpus: list[Sequence[int]],
    workers: int,
    allowed: Sequence[int],
    told: list[tuple[int, ...]],
) -> None:
    assert [gpu.cpus for gpu in gpus.with_room(near(*cpus), workers, allowed)] == told

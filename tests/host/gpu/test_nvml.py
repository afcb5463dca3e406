"""What nvidia-ml-py reads of a driver, and who uses its GPUs: the package over a library in C that
stands for the driver's."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from oobleck.host.gpu.devices import Gpu
from oobleck.host.gpu.sample import (
    READER,
    GpuProcess,
    GpuSample,
    Sample,
    Xid,
    check_unused,
    read_sample,
)
from support.folders import SUPPORT

LIBRARY = "libnvidia-ml.so.1"


def watch(driver: Path, samples: int, every_s: float = 60, **more: str) -> list[Sample]:
    """The first of what it prints. `driver`: the library's folder."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), **more}
    command = [sys.executable, "-m", READER, str(every_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(samples)]
        finally:
            process.kill()
    return [msgspec.json.decode(line, type=Sample) for line in lines]


FIRST, SECOND = "0000:3b:00.0", "0000:b3:00.0"


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    folder = tmp_path_factory.mktemp("driver")
    source, library = SUPPORT / "fake_nvml.c", folder / LIBRARY
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=240)
    return folder


def test_all_that_is_told_of_a_board_and_what_an_old_driver_does_not_know(driver: Path) -> None:
    (sample,) = watch(driver, samples=1)
    assert sample.driver == "570.86.15"
    assert sample.gpus[0] == GpuSample(
        bus=FIRST,
        uuid="GPU-0",
        name="NVIDIA H100",
        ecc_uncorrected=2,
        ecc_corrected=70,
        rows_remapped=2,
        remap_pending=True,
        remap_failed=False,
        retirement_pending=None,
        clock_reasons=0x48,
        clock_mhz=1200,
        most_clock_mhz=1980,
        temperature_c=88,
        power_w=423.5,
        utilization=0.97,
        memory_bytes=80 << 30,
        memory_used_bytes=3 << 30,
        processes=(),
    )


def test_errors_are_told_as_they_come_and_a_lost_board_says_so(driver: Path) -> None:
    first, second = watch(driver, samples=2, every_s=60, FAKE_NVML_LOST="later")
    assert first.xids == ()
    assert second.xids == (Xid(bus=SECOND, code=48), Xid(bus=SECOND, code=79))
    assert second.gpus[0].error == ""
    assert second.gpus[1] == GpuSample(bus=SECOND, error="GPU is lost")


def test_a_reader_that_begins_later_sees_no_lost_board_and_one_that_fails_is_bare(
    driver: Path,
) -> None:
    (sample,) = watch(driver, samples=1, FAKE_NVML_LOST="1", FAKE_NVML_DEAD="1")
    assert sample.gpus == (GpuSample(bus=FIRST),)


def test_without_a_driver_there_is_a_reason_and_nothing_to_wait_for() -> None:
    reason = "NVML: NVML Shared Library Not Found"
    assert read_sample() == Sample(problem=reason, for_good=True)


def test_a_gpu_that_others_compute_on_is_refused(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("FAKE_NVML_PID", str(os.getpid()))
    sample = read_sample()
    assert sample.gpus[0].processes == (GpuProcess(pid=os.getpid(), memory_bytes=3 << 30),)
    mine = Gpu(name="H100", uuid="0", memory_bytes=80 << 30, bus=FIRST, visible="0")
    theirs = Gpu(name="H100", uuid="1", memory_bytes=80 << 30, bus=SECOND, visible="1")
    check_unused([theirs], lambda: sample)
    clock = Clock()
    reason = rf"GPU 0 \(NVIDIA H100\) is used by .+ \(process {os.getpid()}, 3.0 GiB\); end that"
    with pytest.raises(ValueError, match=reason):
        check_unused([mine, theirs], lambda: sample, clock.sleep, clock.now)
    assert clock.at == 10
    lost = Sample(gpus=(GpuSample(bus=SECOND, error="GPU is lost"),))
    check_unused([mine], lambda: lost)
    with pytest.raises(ValueError, match="GPU 1: GPU is lost; restart the host, or name other"):
        check_unused([mine, theirs], lambda: lost)


def test_workers_of_an_agent_before_are_waited_for() -> None:
    busy = GpuSample(bus=FIRST, processes=(GpuProcess(pid=1),))
    free = GpuSample(bus=FIRST, processes=())
    answers = iter([Sample(gpus=(busy,)), Sample(gpus=(busy,)), Sample(gpus=(free,))])
    gpu = Gpu(name="H100", uuid="0", memory_bytes=80 << 30, bus=FIRST, visible="0")
    check_unused([gpu], lambda: next(answers), lambda wait_s: None)
    assert next(answers, None) is None


def test_a_slow_driver_does_not_make_the_wait_longer() -> None:
    clock, asked = Clock(), 0
    gpu = Gpu(name="H100", uuid="0", memory_bytes=80 << 30, bus=FIRST, visible="0")

    def read() -> Sample:
        nonlocal asked
        asked += 1
        clock.sleep(4)
        return Sample(gpus=(GpuSample(bus=FIRST, processes=(GpuProcess(pid=1),)),))

    with pytest.raises(ValueError, match="is used by"):
        check_unused([gpu], read, clock.sleep, clock.now)
    assert (asked, clock.at) == (3, 14)

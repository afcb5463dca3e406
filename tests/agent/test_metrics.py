"""What an agent reads of its host, where one thing that cannot be read costs no other, and of its
GPUs, from recorded samples."""

import os
from collections import namedtuple
from pathlib import Path

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from oobleck.agent import metrics
from oobleck.agent.gpus import GpuHealth
from oobleck.host.gpu.sample import Sample, Xid
from oobleck.host.metrics import Family, render
from support.folders import SUPPORT

Part = namedtuple("Part", "device mountpoint opts")


def test_what_a_kernel_does_not_tell_is_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> None:
        raise NotImplementedError("/proc/diskstats is not there")

    monkeypatch.setattr(psutil, "disk_io_counters", missing)
    found = {reading.family: reading.values for reading in metrics.read_slowly()}
    assert not {metrics.DISK_READ, metrics.DISK_WRITTEN} & set(found)
    assert len(found) == 11


def test_file_systems_that_can_fill_up_are_told_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/disk-\xff")
    os.mkdir(odd)
    parts = [Part("/dev/a", odd, "rw"), Part("/dev/loop1", str(tmp_path), "ro,nodev")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda: parts)
    page = render(metrics.read_slowly(), openmetrics=True).decode()
    assert 'disk-\N{REPLACEMENT CHARACTER}"}' in page
    assert f'"{tmp_path}"' not in page


def test_bytes_of_a_disk_count_once() -> None:
    (read,) = (reading for reading in metrics.read_slowly() if reading.family is metrics.DISK_READ)
    for (name,) in read.values:
        assert not name.startswith(("loop", "ram", "zram", "dm-", "md"))
        assert not Path("/sys/class/block", name, "partition").exists()


WELL, HOT, MENDED, LOST = (
    msgspec.json.decode(line, type=Sample)
    for line in (SUPPORT / "gpu_samples.jsonl").read_bytes().splitlines()
)
FIRST, SECOND = (board.bus for board in WELL.gpus)


def of_gpus(*samples: Sample, places: tuple[str, ...] = (FIRST, SECOND)) -> dict[Family, dict]:
    health = GpuHealth(places=places)
    for sample in samples:
        health.take(sample)
    found = {reading.family: dict(reading.values) for reading in metrics.read_gpus(health)}
    families = {family for family in metrics.FAMILIES if family.name.startswith("oobleck_gpu")}
    assert set(found) == families, "each has its name on the page"
    return found


def test_what_gpus_tell_of_themselves() -> None:
    found = of_gpus(WELL, HOT)
    assert found[metrics.INFO] == {
        (board.bus, board.uuid, board.name, "570.86.15"): 1 for board in WELL.gpus
    }
    assert found[metrics.TEMPERATURE] == {(FIRST,): 89, (SECOND,): 54}
    assert found[metrics.POWER][FIRST,] == 612.5
    assert found[metrics.CLOCK][FIRST,] == 1.2e9
    assert found[metrics.MOST_CLOCK][FIRST,] == 1.98e9
    assert found[metrics.USED][FIRST,] < found[metrics.GPU_MEMORY][FIRST,] == 80 << 30
    assert found[metrics.ECC] == {
        (bus, corrected): count
        for bus in (FIRST, SECOND)
        for corrected, count in (("yes", 3), ("no", 0))
    }
    held = found[metrics.HELD]
    assert {key for key, value in held.items() if value} == {(FIRST, "heat"), (FIRST, "hardware")}
    assert len(held) == 12, "a reason is there before it holds anything"
    assert found[metrics.UTILIZATION] == {}, "these were recorded without it"
    assert set(found[metrics.READABLE].values()) == {1}
    assert set(found[metrics.SICK].values()) == {0}
    busy = replace(WELL, gpus=tuple(replace(board, utilization=0.97) for board in WELL.gpus))
    assert of_gpus(busy)[metrics.UTILIZATION] == {(FIRST,): 0.97, (SECOND,): 0.97}


def test_a_lost_gpu_is_sick_and_tells_nothing_and_each_error_counts() -> None:
    found = of_gpus(WELL, MENDED, LOST)
    assert found[metrics.READABLE] == {(FIRST,): 1, (SECOND,): 0}
    assert found[metrics.SICK] == {(FIRST,): 0, (SECOND,): 1}
    assert (SECOND,) not in found[metrics.TEMPERATURE]
    assert found[metrics.XIDS] == {(FIRST, "94"): 1, (FIRST, "63"): 1, (SECOND, "79"): 1}
    mended = of_gpus(WELL, MENDED)
    assert mended[metrics.RESET_WANTED] == {(FIRST,): 1, (SECOND,): 0}
    assert mended[metrics.REMAPPED] == {(FIRST,): 1, (SECOND,): 0}
    assert mended[metrics.ECC][FIRST, "no"] == 1
    again = Sample(xids=(Xid(bus=FIRST, code=13), Xid(bus=FIRST, code=13), Xid(bus="", code=79)))
    assert of_gpus(WELL, again)[metrics.XIDS] == {(FIRST, "13"): 2, ("", "79"): 1}
    others = Sample(xids=(Xid(bus="0000:ff:00.0", code=79),))
    assert of_gpus(WELL, others)[metrics.XIDS] == {}


def test_where_nvml_is_silent_and_where_there_are_no_gpus() -> None:
    silent = of_gpus(WELL, Sample(problem="NVML has been silent for 60 s"))
    assert silent[metrics.READABLE] == {(FIRST,): 0, (SECOND,): 0}
    assert set(silent[metrics.SICK].values()) == {0}
    assert silent[metrics.TEMPERATURE] == silent[metrics.HELD] == {}, (
        "what is old is not told as new"
    )
    assert len(silent[metrics.ECC]) == 4
    never = of_gpus()
    assert never[metrics.READABLE] == {(FIRST,): 0, (SECOND,): 0}
    assert not any(values for family, values in never.items() if family is not metrics.READABLE)
    assert not any(of_gpus(WELL, places=()).values())

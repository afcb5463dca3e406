"""What an agent reads of its host: one thing that cannot be read costs no other."""

import os
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from oobleck.agent.metrics import host
from oobleck.host.metrics.families import render

Part = namedtuple("Part", "device mountpoint opts")


def test_what_a_kernel_does_not_tell_is_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> None:
        raise NotImplementedError("/proc/diskstats is not there")

    monkeypatch.setattr(psutil, "disk_io_counters", missing)
    found = {reading.family: reading.values for reading in host.read()}
    assert not {host.DISK_READ, host.DISK_WRITTEN} & set(found)
    assert len(found) == 11


def test_file_systems_that_can_fill_up_are_told_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/disk-\xff")
    os.mkdir(odd)
    parts = [Part("/dev/a", odd, "rw"), Part("/dev/loop1", str(tmp_path), "ro,nodev")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda: parts)
    page = render(host.read(), openmetrics=True).decode()
    assert 'disk-\N{REPLACEMENT CHARACTER}"}' in page
    assert f'"{tmp_path}"' not in page


def test_bytes_of_a_disk_count_once() -> None:
    (read,) = (reading for reading in host.read() if reading.family is host.DISK_READ)
    for (name,) in read.values:
        assert not name.startswith(("loop", "ram", "zram", "dm-", "md"))
        assert not Path("/sys/class/block", name, "partition").exists()

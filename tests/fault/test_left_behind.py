"""A run of the benchmarks leaves nothing on the machine, whichever way it is ended."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.support.daemons import descendants
from bench.support.network import remove_left_behind, unusable
from bench.support.scratch import own_name, run_folder, sweep
from support.folders import ROOT
from support.waiting import all_gone, until

pytestmark = pytest.mark.cluster

START = {
    "local": "from bench.support.cluster import LocalCluster as C",
    "networked": "from bench.support.netcluster import NetCluster as C",
}


def started(kind: str) -> subprocess.Popen[bytes]:
    """A run whose cluster has come so far that the processes of all kinds but workers are there."""
    script = f"{START[kind]}\nimport signal\nwith C(1): signal.pause()"
    run = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL)
    until(lambda: any("oobleck.worker.warm" in line for line in lines(run.pid)), "a warm process")
    assert run.poll() is None
    return run


def lines(pid: int) -> Iterator[list[str]]:
    for process in descendants(pid):
        try:
            yield process.cmdline()
        except psutil.Error:
            continue


def things_of(name: str) -> list[str]:
    """Folders, file systems and namespaces of that name."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    places = [
        mount.mountpoint for mount in psutil.disk_partitions(all=True) if mount.device == name
    ]
    found = [line for line in spaces.splitlines() if line.startswith(f"{name}-")] + places
    return found + [str(path) for path in Path(tempfile.gettempdir()).glob(f"{name}-*")]


@pytest.mark.parametrize(
    ("kind", "signum"),
    [
        ("local", signal.SIGTERM),
        ("local", signal.SIGKILL),
        # One that ends by itself is closed in the same way by every test.
        ("networked", signal.SIGKILL),
    ],
)
def test_a_run_that_is_ended_leaves_nothing(kind: str, signum: signal.Signals) -> None:
    if kind == "networked" and (reason := unusable()):
        pytest.skip(reason)
    run = started(kind)
    name = f"oobleck-run-{run.pid}"
    processes = list(descendants(run.pid))
    assert len(processes) >= 4
    assert things_of(name) != []
    run.send_signal(signum)
    assert run.wait() != 0
    all_gone(processes)
    if signum == signal.SIGKILL:
        with run_folder() as own:
            # What the next run does.
            sweep()
            remove_left_behind()
            assert own.exists()
            assert own.name.startswith(own_name())
    assert things_of(name) == []

"""Processor time by cgroup quota, so that a process is as slow as a machine that is.

Needs the right to make control groups (root).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000


class Quota:
    """A control group whose processes together get so many cores."""

    def __init__(self, name: str, cores: float) -> None:
        self._v1 = (_ROOT / "cpu").is_dir()
        self._folder = (_ROOT / "cpu" if self._v1 else _ROOT) / f"{name}-{os.getpid()}"
        self._folder.mkdir()
        self.set(cores)

    def set(self, cores: float) -> None:
        quota_us = round(cores * _PERIOD_US)
        if self._v1:
            (self._folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self._folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")

    def add(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """What is still in it is on its own again."""
        for line in (self._folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self._folder.parent / "cgroup.procs").write_text(line)
        self._folder.rmdir()


@contextlib.contextmanager
def quotas(pids: dict[str, int], cores: float) -> Iterator[dict[str, Quota]]:
    """Each of the processes has so many cores for itself, until the end."""
    made: dict[str, Quota] = {}
    try:
        for name, pid in pids.items():
            made[name] = Quota(f"oobleck-{name.replace('/', '-')}", cores)
            made[name].add(psutil.Process(pid).pid)
        yield made
    finally:
        for quota in made.values():
            quota.remove()

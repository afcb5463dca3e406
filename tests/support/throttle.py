"""Processes that get less than a processor, as on a host that others use too.

By the kernel's quota where this machine lets us make control groups; else the processes are stopped
and continued in turn, ten times in a second.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_numbers = itertools.count()


class Throttle(Protocol):
    def set(self, cores: float) -> None:
        """From now on the process has at most so much of a processor."""


@contextlib.contextmanager
def throttled(pid: int, cores: float) -> Iterator[Throttle]:
    """The process and all its threads have at most `cores` of a processor, until the end."""
    throttle = _Quota.of(pid) or _Turns(pid)
    try:
        throttle.set(cores)
        yield throttle
    finally:
        throttle.close()


class _Quota:
    """A control group of its own."""

    def __init__(self, pid: int, root: Path, version: int) -> None:
        """Raises OSError where the machine does not let us."""
        self._pid, self._root, self._version = pid, root, version
        self._group = root / f"oobleck-test-{os.getpid()}-{next(_numbers)}"
        self._group.mkdir()
        try:
            self.set(1.0)
            (self._group / "cgroup.procs").write_text(str(pid))
        except OSError:
            self._group.rmdir()
            raise

    @classmethod
    def of(cls, pid: int) -> "_Quota | None":
        for root, version in ((_V1, 1), (_V2, 2)):
            with contextlib.suppress(OSError):
                return cls(pid, root, version)
        return None

    def set(self, cores: float) -> None:
        quota_us = round(cores * _PERIOD_US)
        if self._version == 1:
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self._group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            (self._root / "cgroup.procs").write_text(str(self._pid))
        self._group.rmdir()


class _Turns:
    """A thread that stops the process and continues it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cores = 1.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, name="turns")
        self._thread.start()

    def set(self, cores: float) -> None:
        self._cores = cores

    def _take_turns(self) -> None:
        period_s = _PERIOD_US / 1e6
        while not self._over.wait(self._cores * period_s):
            try:
                os.kill(self._pid, signal.SIGSTOP)
                self._over.wait((1 - self._cores) * period_s)
                os.kill(self._pid, signal.SIGCONT)
            except ProcessLookupError:
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join()

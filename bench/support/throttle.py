"""Processes that get less than a processor, as on a host that others use too.

By the kernel's quota where this machine lets us make control groups; else a process is stopped and
continued in turn.
"""

import contextlib
import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

_V1 = Path("/sys/fs/cgroup/cpu")
_V2 = Path("/sys/fs/cgroup")
_PERIOD_US = 20_000
#: Time-out for the end of a process.
_ENDING_S = 60.0
_numbers = itertools.count()


class Throttle(Protocol):
    #: Description of the method.
    how: str

    def set(self, cores: float) -> None:
        """Limit the process to so much of a processor from now on."""

    def close(self) -> None:
        """Lift the limit, if the process lives."""


@contextlib.contextmanager
def throttled(pids: Mapping[str, int], cores: float) -> Iterator[dict[str, Throttle]]:
    """Limit each process, with all its threads, to `cores` of a processor within the context."""
    with contextlib.ExitStack() as stack:
        throttles: dict[str, Throttle] = {}
        for name, pid in pids.items():
            throttles[name] = throttle = _Quota.of(pid) or _Turns(pid)
            stack.callback(throttle.close)
            throttle.set(cores)
        yield throttles


class _Quota:
    """Throttle by a control group."""

    how = "cgroup quota"

    def __init__(self, pid: int, root: Path) -> None:
        """Make the control group. Raise OSError if this machine does not allow it."""
        self._root = root
        self._group = root / f"oobleck-{os.getpid()}-{next(_numbers)}"
        self._group.mkdir()
        try:
            self.set(1.0)
            (self._group / "cgroup.procs").write_text(str(pid))
        except OSError:
            self._group.rmdir()
            raise

    @classmethod
    def of(cls, pid: int) -> "_Quota | None":
        for root in (_V1, _V2):
            with contextlib.suppress(OSError):
                return cls(pid, root)
        return None

    def set(self, cores: float) -> None:
        quota_us = round(cores * _PERIOD_US)
        if self._root == _V1:
            (self._group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self._group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")

    def close(self) -> None:
        deadline = time.monotonic() + _ENDING_S
        while True:
            # Read the group's processes: a process that has ended is not among them, and its pid
            # may be reused.
            for pid in (self._group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self._root / "cgroup.procs").write_text(pid)
            try:
                self._group.rmdir()
                return
            except OSError as error:  # the kernel is still removing an ended process
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)


class _Turns:
    """Throttle by a thread that stops and continues the process."""

    how = "SIGSTOP turns"

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

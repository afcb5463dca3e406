"""Waiting for what comes by itself, however slow this machine is at the moment."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

#: Far beyond what anything here takes on a machine that is stopped for seconds again and again.
PATIENCE_S = 240.0


def until(condition: Callable[[], object], what: str, *, poll_s: float = 0.02) -> None:
    """Look again and again until it holds; fails with `what` where it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(poll_s)


def all_gone(processes: Iterable[psutil.Process]) -> None:
    """Until all have ended; whether they were waited for by their parents is all the same."""
    left = list(processes)

    def none_runs() -> bool:
        left[:] = [process for process in left if _runs(process)]
        return not left

    until(none_runs, f"the end of {left}")


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

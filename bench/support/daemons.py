"""Processes of a cluster: started so that they end with this one, looked for, and killed."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import psutil


def tied(module: str) -> list[str]:
    """The beginning of a command that runs a module of Python, and ends with this process however
    that ends: once the thread that starts it has."""
    return [sys.executable, "-m", "oobleck.host.system.die_with_parent", str(os.getpid()), module]


def descendants(pid: int) -> Iterator[psutil.Process]:
    """The process and all that come from it; none where it is gone."""
    try:
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)
    except psutil.NoSuchProcess:
        return


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_trees(*pids: int) -> list[int]:
    """SIGKILL processes and all their descendants, as when their machines die; returns the pids."""
    victims = [process for pid in pids for process in descendants(pid)]
    # The workers first: the agent must not get to see and report their end.
    for victim in reversed(victims):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return [victim.pid for victim in victims]


def workers_among(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that were forked from an agent's warm process."""
    parents = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parents[process.pid] = (process, process.ppid(), process.cmdline())
    warm = {pid for pid, (_, _, line) in parents.items() if "oobleck.worker.warm" in line}
    return [process for process, parent, _ in parents.values() if parent in warm]

"""Processes of a cluster: started so that they end with this one, looked for, and killed."""

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from oobleck.cli.chaos import injector
from oobleck.host.system.process import with_parent as with_parent

#: Entry of PYTHONPATH for processes that run a module of this checkout that is not installed.
CHECKOUT = str(Path(__file__).resolve().parents[2])
#: Variables of daemons that are to be forked; see `forked`.
FORK_DAEMONS = {"BENCH_FORK_DAEMONS": "1"}
_LOOK_S = 0.005


def children_of(pid: int) -> list[int]:
    """Return the children of `pid`; none if it is gone. Faster than a search of all processes."""
    before, found = None, _children_by_thread(pid)
    # Repeat until two looks agree: the kernel's lists change while threads end.
    while found != before:
        before, found = found, _children_by_thread(pid)
    return found


def _children_by_thread(pid: int) -> list[int]:
    found = []
    gone = contextlib.suppress(FileNotFoundError, ProcessLookupError)
    with gone:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with gone:  # a thread that ends has no children, and the others still have theirs
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def real_process(pid: int) -> int:
    """Return the process that `pid` is, or stands in for (`bench.support.preloaded`)."""
    name, _, number = psutil.Process(pid).name().partition(" ")
    return int(number) if name == "fork" and number else pid


def forked(daemon: int) -> int:
    """Wait for the forked process that does the work of a daemon started with FORK_DAEMONS, and
    return it; the daemon itself if it ends before."""
    while alive(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (real := real_process(daemon)) != daemon:
                return real
        time.sleep(_LOOK_S)
    return daemon


def descendants(pid: int) -> Iterator[psutil.Process]:
    """Yield the process and all its descendants; none if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield psutil.Process(pid)
        real = real_process(pid)
        for child in [*children_of(pid), *([real] if real != pid else [])]:
            yield from descendants(child)


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_trees(*pids: int) -> list[int]:
    """SIGKILL processes and all their descendants, as when their machines die; return the pids."""
    victims = [process for pid in pids for process in descendants(pid)]
    # Workers first, so that the agent cannot report their ends.
    return injector.kill([victim.pid for victim in reversed(victims)])


def hurry(victims: Sequence[psutil.Process]) -> bool:
    """Give the processes to be killed priority over all others, and return whether this user may.
    On a machine of their own they would not wait for processors; and until the kernel has freed a
    worker's memory, its connections stay open."""
    try:
        for pid in (victim.pid for victim in victims):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), -20)
                # If the kernel schedules by session, priority counts only within a process's own
                # session.
                if os.getsid(pid) == pid:
                    Path(f"/proc/{pid}/autogroup").write_text("-20")
    except PermissionError:
        return False
    return True


def await_ends(victims: Sequence[psutil.Process]) -> None:
    """Wait until all of them have ended, even if their parents have not reaped them."""
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(victim.pid)
            try:
                select.select([handle], [], [])
            finally:
                os.close(handle)

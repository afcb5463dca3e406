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

#: On PYTHONPATH of processes that run a module of the checkout's, which is not installed.
CHECKOUT = str(Path(__file__).resolve().parents[2])
#: What daemons get in their environment, for `forked`.
FORK_DAEMONS = {"BENCH_FORK_DAEMONS": "1"}
_LOOK_S = 0.005


def children_of(pid: int) -> list[int]:
    """Processes that `pid` has started; none where it is gone. Looking at all processes of the
    machine takes long."""
    before, found = None, _children_by_thread(pid)
    # A look may miss some where threads end amid it: the kernel's lists change under it.
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
    """The process that `pid` is, or stands for (`bench.support.preloaded`)."""
    name, _, number = psutil.Process(pid).name().partition(" ")
    return int(number) if name == "fork" and number else pid


def forked(daemon: int) -> int:
    """The process that does a daemon's work, where it was started with FORK_DAEMONS, as soon
    as there is one; the daemon itself where it has ended before."""
    while alive(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (real := real_process(daemon)) != daemon:
                return real
        time.sleep(_LOOK_S)
    return daemon


def descendants(pid: int) -> Iterator[psutil.Process]:
    """The process and all that come from it; none where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield psutil.Process(pid)
        real = real_process(pid)
        for child in [*children_of(pid), *([real] if real != pid else [])]:
            yield from descendants(child)


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
    return injector.kill([victim.pid for victim in reversed(victims)])


def hurry(victims: Sequence[psutil.Process]) -> bool:
    """Let those that are to be killed end before anybody else computes: on a machine of their own
    they would not wait for the others' processors. Until the kernel has taken down a worker's
    memory, its connections stay. Whether this user may do that."""
    try:
        for pid in (victim.pid for victim in victims):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), -20)
                # Where the kernel shares out processors by session, of its own session alone.
                if os.getsid(pid) == pid:
                    Path(f"/proc/{pid}/autogroup").write_text("-20")
    except PermissionError:
        return False
    return True


def await_ends(victims: Sequence[psutil.Process]) -> None:
    """Return once all of them have ended, though nobody may have waited for them."""
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(victim.pid)
            try:
                select.select([handle], [], [])
            finally:
                os.close(handle)

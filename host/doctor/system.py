"""Limits that this host sets its processes: memory, processors, open files, threads.

Reading is separate from concluding, so that the latter is a pure function.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from oobleck.core.orders import About, Finding, Level
from oobleck.core.units import format_bytes
from oobleck.host.system.memory import control_file, total_memory

#: Files open at the start, and for each session or link: a connection, its wake-ups, a file or two.
_BASE_FILES, _FILES_EACH = 512, 4
#: Usual default limit, kept low for programs that wait by select().
_USUAL_FILES = 4096
#: Threads of a worker: its own, gRPC's and NCCL's.
_THREADS_EACH = 64
#: With less free memory the kernel may kill any process.
_LEAST_FREE = 256 << 20


class System(msgspec.Struct, frozen=True, kw_only=True):
    #: Memory of the host, or of its control group if that has less.
    memory_bytes: int
    free_bytes: int
    #: Processors that may be used, by affinity and by quota.
    processors: float
    #: Limits of open files of one process, and of threads of this user; None: unlimited.
    files: int | None = None
    threads: int | None = None


def read(root: Path = Path("/")) -> System:
    memory = total_memory(root)
    used = control_file(root, "memory.current")
    free = int(psutil.virtual_memory().available)
    if used.isdigit():
        free = min(free, max(0, memory - int(used)))
    return System(
        memory_bytes=memory,
        free_bytes=free,
        processors=_processors(root),
        files=_limit(resource.RLIMIT_NOFILE),
        threads=_threads(root),
    )


def _limit(which: int) -> int | None:
    """Return the most that the limit may be raised to; None: unlimited."""
    most = resource.getrlimit(which)[1]
    return None if most == resource.RLIM_INFINITY else most


def _threads(root: Path) -> int | None:
    of_group = control_file(root, "pids.max")
    # The kernel does not limit root's threads.
    limits = [None if os.geteuid() == 0 else _limit(resource.RLIMIT_NPROC)]
    limits.append(int(of_group) if of_group.isdigit() else None)
    return min((one for one in limits if one is not None), default=None)


def _processors(root: Path) -> float:
    allowed = float(len(os.sched_getaffinity(0)))
    quota, _, period = control_file(root, "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        return min(allowed, int(quota) / int(period))
    return allowed


def conclude(found: System, about: About, *, gently: bool) -> Iterator[Finding]:
    """Report limits that are too low. `gently`: a job trains here and takes its part of
    the memory."""
    yield from _of_memory(found, about, gently=gently)
    yield from _of_processors(found, about)
    yield from _of_files(found, about)
    needed = _THREADS_EACH * (about.workers + 1)
    if found.threads is not None and found.threads < needed:
        what = f"at most {found.threads} threads may run, and {needed} are needed"
        fix = "raise nproc in /etc/security/limits.conf, TasksMax in a unit, or pids.max"
        yield Finding(check="threads", level="warn", what=what, fix=fix)


def _of_memory(found: System, about: About, *, gently: bool) -> Iterator[Finding]:
    promised = 0 if about.device == "cuda" else about.workers * about.memory_per_worker_bytes
    figures = {"bytes": float(found.memory_bytes), "free_bytes": float(found.free_bytes)}
    has, free = format_bytes(found.memory_bytes), format_bytes(found.free_bytes)
    level: Level = "pass"
    what, fix = f"{free} of {has} are free", ""
    if found.memory_bytes < promised:
        level = "fail"
        what = (
            f"plans may use {format_bytes(promised)} of memory, and the host or its group has {has}"
        )
        fix = "start the agent with a smaller --memory-per-worker, or give its group more"
    elif found.free_bytes < _LEAST_FREE:
        level, what = "fail", f"{free} of memory are free"
        fix = "end its users (ps aux --sort -rss), or the kernel ends a process"
    elif found.free_bytes < promised // 2 and not gently:
        level = "warn"
        what = f"{free} of memory are free, and plans may use {format_bytes(promised)}"
        fix = "end its users (ps aux --sort -rss), or start with a smaller --memory-per-worker"
    yield Finding(check="memory", level=level, what=what, fix=fix, figures=figures)


def _of_processors(found: System, about: About) -> Iterator[Finding]:
    figures = {"processors": found.processors}
    if found.processors < about.workers:
        what = f"{about.workers} workers share {found.processors:g} processors"
        fix = "start the agent with fewer --workers-per-node, or allow it more (cpu.max, taskset)"
        yield Finding(check="processors", level="warn", what=what, fix=fix, figures=figures)
    else:
        what = f"{found.processors:g} may be used"
        yield Finding(check="processors", level="pass", what=what, figures=figures)


def _of_files(found: System, about: About) -> Iterator[Finding]:
    needed = _BASE_FILES + _FILES_EACH * about.connections
    fix = (
        f"set 'nofile {max(needed, 65_536)}' in /etc/security/limits.conf, LimitNOFILE= in a unit, "
        "and start it anew"
    )
    if found.files is None:
        yield Finding(
            check="files", level="pass", what="a process may have any number of them open"
        )
        return
    figures = {"files": float(found.files)}
    what = f"a process may have {found.files} files open"
    if found.files < needed:
        what += f", and {needed} may be needed"
        yield Finding(check="files", level="fail", what=what, fix=fix, figures=figures)
    elif found.files < _USUAL_FILES:
        what += ", which a cluster that grows may need"
        yield Finding(check="files", level="warn", what=what, fix=fix, figures=figures)
    else:
        yield Finding(check="files", level="pass", what=what, figures=figures)

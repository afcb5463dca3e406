"""The memory that this process and others share: how much it is, and whether it has run out.

A control group may have less than the host. A process that the kernel ends for want of memory looks
like any other that got SIGKILL; only a counter of the control group that it was in, or else of the
whole host, tells.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")


def total_memory(root: Path = _ROOT) -> int:
    """Bytes that this host has, or the control group that it is confined to, or one above that.

    Sources: memory.max (control groups, version 2) and memory.limit_in_bytes (version 1).
    """
    limits = [int(psutil.virtual_memory().total)]
    for folder, group, files in _groups(root):
        for above in (group, *group.parents):
            text = _read(folder / above.relative_to("/") / files["limit"]).strip()
            if text.isdigit():  # not "max"
                limits.append(int(text))
    return min(limits)


def kernel_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has ended for want of memory so far, in this control group if
    it counts them, else on this host; 0 where nothing counts.

    Sources: memory.events (control groups, version 2) and memory.oom_control (version 1), then
    /proc/vmstat.
    """
    counted = [
        folder / group.relative_to("/") / files["kills"] for folder, group, files in _groups(root)
    ]
    for path in (*counted, root / "proc/vmstat"):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


def control_file(root: Path, name: str) -> str:
    """What the file says of the control group (version 2) that this process is in; empty: there is
    none."""
    for folder, group, files in _groups(root):
        if files["limit"] == "memory.max":
            return _read(folder / group.relative_to("/") / name).strip()
    return ""


def _groups(root: Path) -> Iterator[tuple[Path, PurePosixPath, dict[str, str]]]:
    """Where the control groups of each version stand, which one is ours, and its files."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    folder = root / "sys/fs/cgroup"
    if "" in groups:
        files = {"limit": "memory.max", "kills": "memory.events"}
        yield folder, PurePosixPath(groups[""]), files
    if "memory" in groups:
        files = {"limit": "memory.limit_in_bytes", "kills": "memory.oom_control"}
        yield folder / "memory", PurePosixPath(groups["memory"]), files


def _read(path: Path) -> str:
    """Empty where the file is of another version, or not shown in this container."""
    try:
        return path.read_text()
    except OSError:
        return ""

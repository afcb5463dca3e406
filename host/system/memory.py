"""Memory that this process and others share: its size, and whether it has run out.

A control group may have less than the host. A process that the kernel kills for lack of memory
looks like any other that got SIGKILL. Only a counter of its control group, or else of the whole
host, shows the cause.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")


def total_memory(root: Path = _ROOT) -> int:
    """Return the bytes of memory of this host, or of the control group that confines it (memory.max
    in version 2, memory.limit_in_bytes in version 1)."""
    limits = [int(psutil.virtual_memory().total)]
    for folder, group, files in _groups(root):
        for above in (group, *group.parents):
            text = _read(folder / above.relative_to("/") / files["limit"]).strip()
            if text.isdigit():  # not "max"
                limits.append(int(text))
    return min(limits)


def kernel_kills(root: Path = _ROOT) -> int:
    """Return how many processes the kernel has killed for lack of memory in this control group
    (memory.events, memory.oom_control), else on this host (/proc/vmstat); 0: unknown."""
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
    """Read a file of this process's control group (version 2); empty if there is none."""
    for folder, group, files in _groups(root):
        if files["limit"] == "memory.max":
            return _read(folder / group.relative_to("/") / name).strip()
    return ""


def _groups(root: Path) -> Iterator[tuple[Path, PurePosixPath, dict[str, str]]]:
    """Yield for each version of control groups: its mount point, this process's group, and the
    names of its files."""
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
    """Read a file; empty if it is of another version, or not shown in this container."""
    try:
        return path.read_text()
    except OSError:
        return ""

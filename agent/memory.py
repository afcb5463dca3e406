"""Whether the kernel has ended processes of this agent for want of memory.

A process that the kernel ends so looks like any other that got SIGKILL; only a counter of the
control group that the agent and its workers are in, or else of the whole host, tells.
"""

from pathlib import Path

_ROOT = Path("/")


def kernel_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has ended for want of memory so far, in this control group if
    it counts them, else on this host; 0 where nothing counts.

    Sources: memory.events (control groups, version 2) and memory.oom_control (version 1), then
    /proc/vmstat.
    """
    for path in (*_of_group(root), root / "proc/vmstat"):
        try:
            lines = path.read_text().splitlines()
        except OSError:  # another version, or not shown in this container
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


def _of_group(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    folder = root / "sys/fs/cgroup"
    found = []
    if "" in groups:
        found.append(folder / groups[""].lstrip("/") / "memory.events")
    if "memory" in groups:
        found.append(folder / "memory" / groups["memory"].lstrip("/") / "memory.oom_control")
    return found

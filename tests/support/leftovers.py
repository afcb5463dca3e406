"""What a process has open: descriptors and threads, Python's and native ones."""

import os
from pathlib import Path


def opened(pid: int | None = None) -> tuple[int, int]:
    """Return the numbers of descriptors and threads."""
    process = Path("/proc", str(pid or os.getpid()))
    return len(os.listdir(process / "fd")), len(os.listdir(process / "task"))

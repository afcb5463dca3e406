"""What a process has open: descriptors and threads, Python's and native ones."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: For threads that end by themselves.
_SETTLE_S = 60.0


def opened(pid: int | None = None) -> tuple[int, int]:
    """Numbers of descriptors and threads."""
    process = Path("/proc", str(pid or os.getpid()))
    return len(os.listdir(process / "fd")), len(os.listdir(process / "task"))


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails when this process has more open after the block than before it, and keeps it."""
    before = opened()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while any(now > then for now, then in zip(opened(), before, strict=True)):
        assert time.monotonic() < deadline, f"descriptors, threads: {before}, then {opened()}"
        time.sleep(0.02)

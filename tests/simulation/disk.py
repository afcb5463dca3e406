"""The disk of the head node, as `oobleck.master.storage.disk` sees it: it may be full, and the
process may die in the middle of a write.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from oobleck.master import process
from oobleck.master.storage import disk

#: Place of `f_bavail` in what `os.statvfs` tells.
_AVAILABLE = 4


class Disk:
    """Stands in for `os` where the master writes."""

    def __init__(self) -> None:
        #: Nothing but the journal has room, which is held back for it.
        self.full = False
        self.journal_writes = False
        #: Called at each point of `oobleck.master.process`.
        self.reached: Callable[[str], None] = lambda point: None
        self.armed, self._passes = "", 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of the real one."""
        before = process.reach, process.is_armed
        disk.os = self  # type: ignore[assignment]
        process.reach, process.is_armed = self.reached, lambda point: point == self.armed
        try:
            yield
        finally:
            disk.os = os
            process.reach, process.is_armed = before

    def arm(self, point: str, passes: int) -> None:
        """Have the master die when it gets to `point` for so many times."""
        self.armed, self._passes = point, passes

    def strikes(self, point: str) -> bool:
        """Whether the master dies now."""
        if point != self.armed:
            return False
        self._passes -= 1
        if self._passes <= 0:
            self.armed = ""
        return not self.armed

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        """A part still fits, and then nothing."""
        if not self.full or self.journal_writes:
            return os.write(descriptor, data)
        if len(data) > 1:
            return os.write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def statvfs(self, path: Any) -> os.statvfs_result:
        found = list(os.statvfs(path))
        found[_AVAILABLE] = 1 << 30
        if self.full:
            found[_AVAILABLE] = 0
        return os.statvfs_result(found)

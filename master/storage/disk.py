"""Policy for a full disk: the journal comes first.

A file reserves a part of the disk for the journal and is removed when the disk is full. Then the
journal has space for the decisions on running jobs. All other data wait in memory and with the
agents, and new jobs are refused. When there is space again the file is made again, and normal
operation resumes. While even the journal cannot be written, the master decides nothing; training
continues.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oobleck.master import process

log = logging.getLogger(__name__)

#: Size of the reserve: thousands of decisions.
RESERVE_BYTES = 4 << 20
#: Free bytes below which the disk counts as full even before a write fails.
LOW_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Interval at which the disk is checked.
LOOK_S = 1.0


class StorageFailed(Exception):
    """Failure to write to the state directory; the text is one line."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Raise OSErrors of writing `path` as StorageFailed."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written ({error.strerror or error})") from error


def append(descriptor: int, data: bytes, *, torn: str, sync: bool) -> None:
    """Write all of `data` to the end of an open file, or leave it as it was. Raises OSError.
    `sync`: force it to the disk; `torn`: crash point in the middle."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        if process.is_armed(torn):
            half = len(data) // 2
            os.write(descriptor, data[:half])
            process.reach(torn)
            data = data[half:]
        while data:  # a nearly full disk may write only a part
            data = data[os.write(descriptor, data) :]
        if sync:
            os.fdatasync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class Storage:
    """State of the state directory's disk, and the file that reserves space."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir
        self._reserve = state_dir / "reserve"
        #: Problem as text for operators, with the fix; empty: none.
        self.problem = ""
        self._looked_at = float("-inf")
        self._hold_back()

    def look(self, now: float) -> bool:
        """Check the disk, unless it was just checked; return whether it has space again."""
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        if not self.problem:
            try:
                if self._free_bytes() < LOW_BYTES:
                    self._say("less than 1 MiB is free")
            except OSError as error:
                self._say(f"{self._directory} cannot be looked at ({error.strerror})")
            return False
        wanted = LOW_BYTES + (0 if self._reserve.exists() else RESERVE_BYTES)
        try:
            if self._free_bytes() < wanted or not self._hold_back():
                return False
        except OSError:
            return False
        log.warning("the state directory can be written again")
        self.problem = ""
        return True

    def failed(self, failure: StorageFailed) -> None:
        """Note a failed write, which is repeated when `look` finds space."""
        self._say(str(failure))

    def give_way(self) -> bool:
        """Remove the reserve, to give the journal its space; return whether there was one."""
        try:
            self._reserve.unlink()
        except OSError:  # there is none, or it cannot be removed
            return False
        log.warning("the room held back for the journal is used")
        return True

    def _say(self, words: str) -> None:
        if not self.problem:
            self.problem = (
                f"the state directory cannot take more ({words}): new jobs are refused, those that "
                f"run go on; free space in {self._directory} or make it writable"
            )
            log.error("storage failed", extra={"reason": words})

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize

    def _hold_back(self) -> bool:
        """Make the file that reserves space; return whether it exists."""
        try:
            descriptor = os.open(self._reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _FULL:
                self._reserve.unlink(missing_ok=True)
            self._say(f"{self._reserve} cannot be written ({error.strerror})")
            return False
        return True

"""Policy for a full disk: who may still write, and until when.

Decisions need the journal first, so a part of the disk is held back for it, in a file. When the
disk is full that file goes: the journal has room for the decisions on jobs that run, all other
files wait in memory and with the agents, and new jobs are refused. When there is room again the
file is made again, and all is as before. Where even the journal cannot be written, the master
decides nothing until it can; training goes on meanwhile.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oobleck.master import process

log = logging.getLogger(__name__)

#: What is held back: thousands of decisions.
RESERVE_BYTES = 4 << 20
#: With less than this the disk counts as full before a write has failed.
LOW_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Between two looks at the disk.
LOOK_S = 1.0


class StorageFailed(Exception):
    """The state directory takes no more; the text is one line."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Around what writes `path`. Raises StorageFailed."""
    try:
        yield
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written ({error.strerror or error})") from error


def append(descriptor: int, data: bytes, *, torn: str, sync: bool) -> None:
    """Write all of `data` to the end of an open file, or leave it as it was. Raises OSError.

    `sync`: have it on the disk. `torn`: the point at which a test may have the process die in the
    middle.
    """
    size = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        if process.is_armed(torn):
            half = len(data) // 2
            os.write(descriptor, data[:half])
            process.reach(torn)
            data = data[half:]
        while data:  # a disk that is nearly full takes a part and refuses the rest
            data = data[os.write(descriptor, data) :]
        if sync:
            os.fdatasync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class Storage:
    """State of the state directory's disk: whether it takes writes, and the file that reserves
    space."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir
        self._reserve = state_dir / "reserve"
        #: For operators, with the way out; empty: all is well.
        self.problem = ""
        self._looked_at = float("-inf")
        self._hold_back()

    def look(self, now: float) -> bool:
        """Look at the disk, if that was not just done; returns whether it has room again."""
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
        """Something could not be written; it is tried again when `look` sees room."""
        self._say(str(failure))

    def give_way(self) -> bool:
        """Free what is held back, for the journal; returns whether there was anything."""
        try:
            self._reserve.unlink()
        except OSError:  # it is not there, or nothing can be changed here any more
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
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize

    def _hold_back(self) -> bool:
        """Returns whether the file is there."""
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

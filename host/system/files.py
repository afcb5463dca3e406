"""Files made or named by others: only regular ones are opened, and only a bounded part of them is
read.

A pipe in a file's place would block, and a file of any size would fill the memory. Must not know
their content.
"""

import errno
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

_MACHINE_ID = Path("/etc/machine-id")


class WrongFile(OSError):
    """Error for a path that is not a regular file, or a file too large: retrying would fail
    again."""


def open_at_once(path: str | Path) -> int:
    """Return a descriptor for reading, without waiting for a pipe's writer. Raises OSError."""
    if "\0" in str(path):
        raise WrongFile(errno.EINVAL, "a file name cannot contain NUL")
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def open_regular(path: str | Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError."""
    descriptor = open_at_once(path)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise WrongFile(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise WrongFile(errno.EINVAL, "is not a regular file", str(path))
        return open(descriptor, "rb", buffering=buffering)
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a file of at most `most_bytes`. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(size, most_bytes)
        return file.read(size)


def check_size(size: int, most_bytes: int) -> None:
    """Raise WrongFile if the size exceeds `most_bytes`."""
    if size > most_bytes:
        raise WrongFile(errno.EFBIG, f"has {size} bytes, more than {most_bytes}")


def sync_directory(path: Path) -> None:
    """Sync a directory, so that a file put into it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_of(path: Path) -> str:
    """Return an identity of this file or folder on this host. A copy, also on another host, has a
    different one. Raises OSError."""
    try:
        host = _MACHINE_ID.read_text().strip()
    except OSError:
        host = ""
    return hashlib.sha256(f"{host} {path.stat().st_ino}".encode()).hexdigest()[:16]


# ---- home directory of this process's user; in a container there may be none


def below_home(place: str | Path) -> Path:
    """Return `place` with ~ expanded. Raises ValueError, with the fix, if there is no home."""
    try:
        return Path(place).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{place}: this process's user has no home directory; set the variable HOME to a "
            "directory that it may write to, or name another place"
        ) from error

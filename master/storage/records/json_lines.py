"""Files of JSON lines that are only appended to, and how a crash leaves them.

What the disk does not take waits in memory. A file is open only while lines are written, so that a
master may know any number of jobs. Must not know what the lines tell.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from oobleck.master.storage.disk import StorageFailed, append, storing

T = TypeVar("T")

#: Enough for the last lines of most files; more is read where it is not.
_TAIL_BYTES = 64 * 1024
#: Read at a time for an operator.
_READ_BYTES = 1 << 20


class JsonLines:
    """File of JSON lines, with the lines that are not yet written to it."""

    def __init__(self, path: Path, torn: str, *, sync: bool = True) -> None:
        """`torn`: the point at which a test may have the process die in the middle of a write.
        `sync`: each write is forced to the disk."""
        self.path = path
        self._torn, self._sync = torn, sync
        self._unwritten: list[bytes] = []

    def recover(self, read: Callable[[bytes], T], most: int) -> tuple[T, ...]:
        """Return the last lines as `read` parses them, at most `most` of them, oldest first; none
        where there is no file.

        An incomplete end of the file is cut off first: a line without its newline, or one that
        `read` raises ValueError for. Raises StorageFailed.
        """
        with storing(self.path):
            if not self.path.exists():
                return ()
            if not self.path.is_file():
                raise StorageFailed(f"{self.path} is not a regular file; move it away")
            return _recover(self.path, read, most)

    def add(self, line: bytes) -> None:
        self._unwritten.append(line + b"\n")

    @property
    def unwritten(self) -> int:
        return len(self._unwritten)

    def write(self) -> None:
        """Put all that was added into the file. Raises StorageFailed; then nothing of it is."""
        if not self._unwritten:
            return
        with storing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                data = b"".join(self._unwritten)
                append(file.fileno(), data, torn=self._torn, sync=self._sync)
        self._unwritten.clear()


def whole_lines(file: BinaryIO) -> bytes:
    """Read some whole lines from the file's position on; empty: no whole line is left."""
    text = file.read(_READ_BYTES)
    while text and b"\n" not in text and (more := file.read(_READ_BYTES)):
        text += more
    return text[: text.rfind(b"\n") + 1]


def _recover(path: Path, read: Callable[[bytes], T], most: int) -> tuple[T, ...]:
    with open(path, "r+b", buffering=0) as file:
        size, tail_bytes = file.seek(0, os.SEEK_END), _TAIL_BYTES
        while True:
            start, end = max(0, size - tail_bytes), size
            file.seek(start)
            # What is before the first newline began before the tail.
            lines = file.read().splitlines(keepends=True)[1 if start else 0 :]
            while lines and not _is_whole(lines[-1], read):
                end -= len(lines.pop())
            if start == 0 or len(lines) >= most:
                break
            tail_bytes *= 2
        if end != size:
            file.truncate(end)
            os.fsync(file.fileno())
    return tuple(read(line) for line in lines[-most:])


def _is_whole(line: bytes, read: Callable[[bytes], object]) -> bool:
    try:
        read(line)
    except ValueError:
        return False
    return line.endswith(b"\n")

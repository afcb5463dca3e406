"""Files of JSON lines that are only appended to, as a crash leaves them.

Must not know what the lines tell.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: Enough for the last lines of most files; more is read where it is not.
_TAIL_BYTES = 64 * 1024


def recover(path: Path, read: Callable[[bytes], T], most: int) -> tuple[T, ...]:
    """What `read` makes of the last lines, at most `most` of them, oldest first; none where there
    is no file.

    An end of the file that is no whole line is cut off first: one without its newline, or that
    `read` raises ValueError for. Raises OSError.
    """
    if not path.exists():
        return ()
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

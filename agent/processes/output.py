"""Output of workers: the last lines for the report of an exit, all lines for the master.

Bounded at both ends: a line is cut, and lines that arrive faster than the session takes them are
dropped and counted. Must not know gRPC.
"""

import os
from collections import deque

TAIL_LINES = 20
LINE_BYTES = 4096
#: Lines of one slot that wait for the session.
WAITING_LINES = 1000
_READ_BYTES = 65_536


class Tail:
    """Splitter of one worker's output into lines, which remembers the last ones."""

    def __init__(self) -> None:
        self._partial = b""
        self._last: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes; a line that is too long is cut in pieces."""
        *whole, self._partial = (self._partial + data).split(b"\n")
        lines = [text(piece) for line in whole for piece in _pieces(line)]
        while len(self._partial) >= LINE_BYTES:
            lines.append(text(self._partial[:LINE_BYTES]))
            self._partial = self._partial[LINE_BYTES:]
        self._last.extend(lines)
        return lines

    def finish(self) -> list[str]:
        """Return the last line, if the output ended without a newline."""
        return self.feed(b"\n") if self._partial else []

    def last_line(self) -> str:
        """Return the last non-blank line; for a Python error that is its name and text."""
        return next((line for line in reversed(self._last) if line.strip()), "")

    def last_lines(self) -> str:
        return "\n".join(self._last)


def text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


def _pieces(line: bytes) -> list[bytes]:
    return [line[i : i + LINE_BYTES] for i in range(0, len(line), LINE_BYTES)] or [b""]


def read_available(descriptor: int) -> tuple[bytes, bool]:
    """Read from a non-blocking pipe, up to a bound, and return whether its other end is closed."""
    try:
        data = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return b"", False
    return data, not data


class LogQueue:
    """Queue of lines for the session, in the order in which they arrived."""

    def __init__(self, limit: int = WAITING_LINES) -> None:
        self._limit = limit
        self._waiting: dict[int, deque[str]] = {}
        self._dropped: dict[int, int] = {}

    def add(self, slot: int, lines: list[str]) -> None:
        """Add lines; if too many wait, drop the oldest."""
        waiting = self._waiting.setdefault(slot, deque())
        waiting.extend(lines)
        while len(waiting) > self._limit:
            waiting.popleft()
            self._dropped[slot] = self._dropped.get(slot, 0) + 1

    def take(self, count: int) -> tuple[int, list[str], int] | None:
        """Take up to `count` lines of one slot, with the number of lines dropped before them."""
        for slot, waiting in self._waiting.items():
            if waiting:
                lines = [waiting.popleft() for _ in range(min(count, len(waiting)))]
                return slot, lines, self._dropped.pop(slot, 0)
        return None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

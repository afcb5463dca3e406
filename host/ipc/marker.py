"""Marker of the user's code that a process is running, readable after that process ends.

The marker is a page of shared memory behind a descriptor, written by one process. After `os._exit`
in a user's code it is the only evidence of the cause.
"""

import mmap
import os
import re

from oobleck.core.units import MOST_REASON_BYTES, head
from oobleck.host.display import inline

_BYTES = 1024
_LENGTH_BYTES = 2
#: Shortest part of a line that is useful.
_LEAST_LINE_BYTES = 16
#: Begin of a line of our own log.
_OUR_LOG = re.compile(r"\d{4}-\d\d-\d\dT\S+ (DEBUG|INFO|WARNING|ERROR) ")


class Marker:
    """Reader or writer of a shared page; both ends are alike."""

    def __init__(self, fd: int | None = None) -> None:
        """Map the page behind `fd` and own `fd`; None: create a page."""
        if fd is None:
            fd = os.memfd_create("marker")
            os.truncate(fd, _BYTES)
        self.fd = fd
        self._page = mmap.mmap(fd, _BYTES)

    def write(self, running: str) -> None:
        """Record the running code, cut to the page's size; empty: nothing runs."""
        data = running.encode(errors="replace")[: _BYTES - _LENGTH_BYTES]
        self._page[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)  # valid if the process ends here
        self._page[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        self._page[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "big")

    def read(self) -> str:
        """Return the running code; empty: nothing runs. Do not trust the text: user code can write
        it."""
        size = int.from_bytes(self._page[:_LENGTH_BYTES], "big")
        return self._page[_LENGTH_BYTES : _LENGTH_BYTES + size].decode(errors="replace")

    def verdict(self, status: int | None) -> str:
        """Return the error if the process exited while user code ran in it; empty: none ran, or a
        signal ended it. `status`: a subprocess return code, None for a signal."""
        running = self.read()
        if not running or status is None or status < 0:
            return ""
        return f"{inline(running)}: the user's code ended the process with status {status}"

    def close(self) -> None:
        """Close this end; the page lives on while the other end is open."""
        self._page.close()
        os.close(self.fd)


def with_last_line(verdict: str, line: str) -> str:
    """Append the process's last printed line to the verdict: a library that ends the process prints
    its reason there. Leave out a line of our own log."""
    if _OUR_LOG.match(line):
        return verdict
    room = MOST_REASON_BYTES - len(f"{verdict} (its last line: )".encode())
    if not line.strip() or room < _LEAST_LINE_BYTES:
        return verdict
    return f"{verdict} (its last line: {head(inline(line.strip()), room)})"

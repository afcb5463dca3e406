"""What of a user's code a process runs, where another one can read it, however the first one ends.

A page of shared memory behind a descriptor, which one process writes. An `os._exit` in a user's
code leaves nothing else to tell of it.
"""

import mmap
import os

from oobleck.host.display import inline

_BYTES = 1024
_LENGTH_BYTES = 2


class Marker:
    """One end of a page; both ends are alike."""

    def __init__(self, fd: int | None = None) -> None:
        """Map the page behind `fd`, which is closed with it; None: make a new one."""
        if fd is None:
            fd = os.memfd_create("marker")
            os.truncate(fd, _BYTES)
        self.fd = fd
        self._page = mmap.mmap(fd, _BYTES)

    def write(self, running: str) -> None:
        """Keep what runs, or as much of it as there is room for; empty: nothing does."""
        data = running.encode(errors="replace")[: _BYTES - _LENGTH_BYTES]
        self._page[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)  # the process may end at any moment
        self._page[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = data
        self._page[:_LENGTH_BYTES] = len(data).to_bytes(_LENGTH_BYTES, "big")

    def read(self) -> str:
        """Return what runs; empty: nothing does. The writer may be anybody's code."""
        size = int.from_bytes(self._page[:_LENGTH_BYTES], "big")
        return self._page[_LENGTH_BYTES : _LENGTH_BYTES + size].decode(errors="replace")

    def verdict(self, status: int | None) -> str:
        """Return the sentence for a process that has ended while a user's code ran in it, which
        nothing of ours does; empty: none ran, or a signal ended it. `status`: as of subprocess, or
        None for a signal."""
        running = self.read()
        if not running or status is None or status < 0:
            return ""
        return f"{inline(running)}: the user's code ended the process with status {status}"

    def close(self) -> None:
        """Unmap the page, which is kept as long as the other end has it."""
        self._page.close()
        os.close(self.fd)

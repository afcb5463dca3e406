"""Early detection that a process is ending, before it has ended.

The kernel closes a process's sockets, and lets its parent wait for it, once its memory is freed: a
tenth of a second for each gigabyte on a host, seconds where a GPU's driver has something to free.
But its first thread is exiting by then, and its exit status is known, since all threads of a
process end together. The kernel sends no notice of that (a pidfd is of the whole process), so this
polls, at some microseconds each. Must not know what the process is for.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

#: Between two looks.
LOOK_S = 0.02
_MOST_BYTES = 1024
#: linux/sched.h: PF_EXITING.
_EXITING = 0x4

#: Exit code, or the signal.
How = tuple[int | None, int | None]


class EndWatch:
    """Watch of one process's end, in the event loop."""

    def __init__(self, pid: int, tell: Callable[[How], None]) -> None:
        """`tell`: called once, if it can be told how the process ends before it has ended."""
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._file: int | None = None
        with suppress(OSError):  # it has ended already: its parent knows
            self._file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _look(self) -> None:
        assert self._file is not None, "it is stopped otherwise"
        try:
            said = os.pread(self._file, _MOST_BYTES, 0).decode(errors="replace")
        except OSError:  # its parent knows
            self.stop()
            return
        if (how := how_it_ends(said)) is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)
            return
        self.stop()
        self._tell(how)


def how_it_ends(said: str) -> How | None:
    """Return how the process is ending; None if it is not, or if the kernel does not show how, as
    for a successful exit. A process whose first thread alone has ended with an error looks as if it
    ended. `said`: /proc/PID/stat."""
    fields = said.rpartition(") ")[2].split()
    flags, status = int(fields[6]), int(fields[-1])
    if not flags & _EXITING or not status:
        return None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None

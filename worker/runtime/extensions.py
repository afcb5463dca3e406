"""Bounded waits for extensions that torch compiles in users' code (`load_inline`, `load`).

torch locks an extension's folder by a file. If the compiling process is killed, the file stays and
torch waits for ever. A live one keeps the file open, which other processes of its host can see.
"""

import os
import time
from pathlib import Path

from torch.utils.file_baton import FileBaton

from oobleck.worker.runtime.errors import NodeError

#: Longest time without a change in a folder that no process of this host has locked. A process of
#: another host may be compiling there.
STALE_S = 60.0
_LOOK_S = 0.5


def bound_waits() -> None:
    """Make torch's waits raise NodeError if the lock is of a killed process."""
    FileBaton.wait = _wait  # type: ignore[method-assign, assignment]  # torch's has no limit


def _wait(baton: FileBaton) -> None:
    lock = Path(baton.lock_file_path)
    changed, since = _changed(lock), time.monotonic()
    while lock.exists():
        if _is_open(lock) or _changed(lock) != changed:
            changed, since = _changed(lock), time.monotonic()
        if time.monotonic() - since > STALE_S:
            raise NodeError(
                f"{lock} is the lock of a process that was killed while it compiled an extension "
                f"of torch; remove it, as by rm {lock}, and start again"
            )
        time.sleep(_LOOK_S)


def _changed(lock: Path) -> float:
    """Return the time of the last change of the lock's folder or a file in it."""
    try:
        with os.scandir(lock.parent) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max([lock.parent.stat().st_mtime, *times])
    except FileNotFoundError:  # just removed
        return 0.0


def _is_open(lock: Path) -> bool:
    """Return whether a process of this user has the lock open."""
    place = str(lock.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == place:
                return True
        except OSError:  # another user's, or just closed
            continue
    return False

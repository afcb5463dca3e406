"""An end to the wait for extensions that torch compiles in users' code (`load_inline`, `load`).

torch locks the folder of an extension by a file, and waits for ever for the file of a process that
was killed. A process that compiles keeps it open, which others of its host can see.
"""

import os
import time
from pathlib import Path

from torch.utils.file_baton import FileBaton

from oobleck.worker.runtime.errors import NodeError

#: How long nothing may change in a folder that no process of this host has locked: one of another
#: host may be at work there.
STALE_S = 60.0
_LOOK_S = 0.5


def bound_waits() -> None:
    """Have torch's waits raise NodeError where the lock is a killed process's."""
    FileBaton.wait = _wait  # type: ignore[method-assign, assignment]  # it has no limit of its own


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
    """When the folder of the lock, or a file in it, was last changed."""
    try:
        with os.scandir(lock.parent) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max([lock.parent.stat().st_mtime, *times])
    except FileNotFoundError:  # it was removed just now
        return 0.0


def _is_open(lock: Path) -> bool:
    """Whether a process of this user has it open."""
    place = str(lock.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == place:
                return True
        except OSError:  # of another user, or closed by now
            continue
    return False

"""A state directory has one master at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from oobleck.master.config import Unusable

#: File in a state directory that its master locks; it stays when the master ends.
LOCK = "lock"


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory against other masters. Raises Unusable."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Unusable(
            f"--state-dir {state_dir} cannot be written ({error.strerror}); choose another one"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = "unknown"
            with contextlib.suppress(OSError):
                holder = os.pread(lock, 20, 0).decode(errors="replace") or holder
            raise Unusable(
                f"--state-dir {state_dir} is in use by another master (pid {holder}); "
                "stop it or choose another directory"
            ) from error
        with contextlib.suppress(OSError):  # the lock is held, also where the disk is full
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)

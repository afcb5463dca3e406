"""Process of the master: its lock, its heap, and the points at which tests kill it.

By default each of gRPC's threads takes memory from a heap of its own, up to eight for each core,
and the others cannot use what is free there; so all threads share one.

Python's cycle collector looks at every living object while all tasks wait: with a thousand agents
for 115 to 135 ms, once in ten seconds. So objects that have survived one full collection are left
out of the next ones, until all are looked at again after ten minutes.

A crash point makes the master die as by `kill -9`. `arm` is called once, from the command line; if
nothing is armed `reach` does nothing. The point of a torn write lies between its two halves.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from oobleck.master.config import Unusable

#: File in a state directory that its master locks; it stays when the master ends.
LOCK = "lock"
#: M_ARENA_MAX of glibc.
_ARENA_MAX = -8
_OLDEST = 2
#: Interval between collections of all objects; an excluded cycle may live this long.
_WHOLE_S = 600.0
POINTS = (
    "applied",  # decided and applied, not in the journal
    "journal-torn",
    "committed",  # in the journal, nothing is sent
    "events-torn",
    "told",  # the agents' assignments are in their outboxes
    "metrics-torn",
    "evaluations-torn",
    "snapshot-written",  # the new journal file is written, and not in place
    "snapshot-placed",
)


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Lock the state directory against other masters. Raises Unusable."""
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
        with contextlib.suppress(OSError):  # the lock is held even if the disk is full
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


def share_heap() -> None:
    """Have all threads take memory from one heap. Does nothing where the C library cannot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """Return free heap memory to the kernel. Does nothing where the C library cannot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def short_collections(now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Have full collections look only at new objects, and at all of them every ten minutes."""
    whole_at = now()

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal whole_at
        if info["generation"] != _OLDEST:
            return
        if phase == "stop":
            gc.freeze()
        elif now() >= whole_at + _WHOLE_S:
            whole_at = now()
            gc.unfreeze()

    gc.callbacks.append(collecting)
    try:
        yield
    finally:
        gc.callbacks.remove(collecting)
        gc.unfreeze()


_armed: list[tuple[str, int]] = []


def arm(point: str, count: int) -> None:
    """Arm `point`: the process dies when it is reached the `count`-th time. Raises ValueError."""
    if point not in POINTS:
        raise ValueError(f"{point!r} is no point to die at; there are {', '.join(POINTS)}")
    _armed.append((point, count))


def is_armed(point: str) -> bool:
    return any(name == point for name, _ in _armed)


def reach(point: str) -> None:
    for index, (name, left) in enumerate(_armed):
        if name == point:
            if left <= 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _armed[index] = (name, left - 1)

"""The heap of the master's process: free memory goes back to the kernel, and collections are short.

Python's cycle collector looks at every living object while everybody waits: with a thousand agents
for 115 to 135 ms, once in ten seconds. So objects that have survived one full collection are left
out of the next ones, until all are looked at again after ten minutes.
"""

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator

_OLDEST = 2
#: From one look through all objects to the next: so long a cycle that was left out may live on.
_WHOLE_S = 600.0


def give_back() -> None:
    """Return free heap memory to the kernel. Does nothing where the C library cannot."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)


@contextlib.contextmanager
def short_collections(now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Within it, a full collection looks through what has come since the last one, and through
    everything only if that was not done for ten minutes. For the whole process."""
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

"""Settings of the C library's heap, so that it keeps freed memory.

A step takes and frees the same memory repeatedly. By default glibc returns freed memory to the
kernel, and the next micro-batch pays for tens of thousands of page faults. Blocks of some megabytes
are still returned: keeping them took 15% more memory than was in use.
"""

import ctypes

from oobleck.planner.profile.memory import MAPPED_BYTES

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIM = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in this process and its forks. Return False where the C library has no such
    setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    )


def give_back() -> None:
    """Return free memory to the kernel, where the C library can do that."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return

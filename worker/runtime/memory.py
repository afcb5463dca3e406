"""Peak memory of this worker's device during training.

On a CPU it is the process's anonymous memory, less the memory before the first layer, which is
reported as the base. A plan predicts only what layers take. On a GPU it is the memory that torch's
allocator has handed out, and the base is 0.

Also sets the heap to keep freed memory.
"""

import ctypes
import re
from pathlib import Path

import torch

from oobleck.core.messages import MemoryUse
from oobleck.planner.profile.memory import MAPPED_BYTES
from oobleck.worker.runtime.device import has_queue

# ---- Settings of the C library's heap, so that it keeps freed memory.
#
# A step takes and frees the same memory repeatedly. By default glibc returns freed memory to the
# kernel, and the next micro-batch pays for tens of thousands of page faults. Blocks of some
# megabytes are still returned: keeping them took 15% more memory than was in use.


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


_STATUS = Path("/proc/self/status")
#: Writing 5 to it sets the peak to the current memory.
_CLEAR = Path("/proc/self/clear_refs")
_FIELD = re.compile(rb"^(VmHWM|RssAnon|RssFile|RssShmem):\s*(\d+) kB$", re.MULTILINE)


class MemoryMeter:
    """Meter of one process's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes = 0

    def begin(self) -> None:
        """Note the base: the process holds no layer yet, and everything else that it needs."""
        if not has_queue(self._device):
            self._base_bytes = _fields()["RssAnon"]

    def restart(self) -> None:
        """Forget the peak so far. Where the kernel does not allow that, it stays."""
        if has_queue(self._device):
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_bytes(b"5")
        except OSError:  # a kernel without it, or a sandbox
            return

    def read(self) -> MemoryUse:
        """Return the peak since the last restart; takes some ten microseconds."""
        if has_queue(self._device):
            board = torch.get_device_module(self._device)
            return MemoryUse(peak_bytes=board.max_memory_allocated(self._device), base_bytes=0)
        now = _fields()
        # Mapped file memory only grows in training, so at the peak there was no more of it.
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return MemoryUse(peak_bytes=max(peak, now["RssAnon"]), base_bytes=self._base_bytes)


def _fields() -> dict[str, int]:
    """Return the bytes of each field, by name."""
    found = _FIELD.findall(_STATUS.read_bytes())
    return {name.decode(): int(value) << 10 for name, value in found}

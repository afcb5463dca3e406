"""The most memory of this worker's device that training has taken.

On a CPU it is the process's anonymous memory, less what was there before the first layer, which is
reported as the base: a plan predicts only what layers take. On a GPU it is what torch's allocator
has handed out, and the base is nothing.
"""

import re
from pathlib import Path

import torch

from oobleck.core.messages import MemoryUse

_STATUS = Path("/proc/self/status")
#: Writing 5 to it sets the peak to what is there now.
_CLEAR = Path("/proc/self/clear_refs")
_FIELD = re.compile(rb"^(VmHWM|RssAnon|RssFile|RssShmem):\s*(\d+) kB$", re.MULTILINE)


class MemoryMeter:
    """Meter of one process's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes = 0

    def begin(self) -> None:
        """Note the base: the process holds no layer yet, and has all that it needs beside them."""
        if self._device.type != "cuda":
            self._base_bytes = _fields()["RssAnon"]

    def restart(self) -> None:
        """Forget the peak so far. Where the kernel does not allow that, it stays."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_bytes(b"5")
        except OSError:  # a kernel without it, or a sandbox
            return

    def read(self) -> MemoryUse:
        """Return the peak since the last restart; some ten microseconds' work."""
        if self._device.type == "cuda":
            return MemoryUse(peak_bytes=torch.cuda.max_memory_allocated(self._device), base_bytes=0)
        now = _fields()
        # What is mapped of files only grows in training, so at the peak there was no more of it.
        peak = now["VmHWM"] - now["RssFile"] - now["RssShmem"]
        return MemoryUse(peak_bytes=max(peak, now["RssAnon"]), base_bytes=self._base_bytes)


def _fields() -> dict[str, int]:
    """Return the bytes of each field, by name."""
    found = _FIELD.findall(_STATUS.read_bytes())
    return {name.decode(): int(value) << 10 for name, value in found}

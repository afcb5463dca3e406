"""Memory that is taken and freed again and again costs page faults once."""

import platform
import subprocess
import sys

import pytest

_PAGES = 8192  # of 4 KiB in 32 MiB, what is taken and freed at a time
SCRIPT = """
import ctypes, resource, sys
from oobleck.worker.runtime.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
size = int(sys.argv[2]) << 20
def use():
    blocks = [libc.malloc(size) for _ in range((32 << 20) // size)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setting: str, mebibytes: int) -> int:
    """Page faults of ten rounds that take and free blocks of so many MiB."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, setting, str(mebibytes)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept() -> None:
    assert faults("keep", 2) < _PAGES
    assert faults("leave", 2) > 4 * _PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_blocks_go_back_to_the_kernel() -> None:
    assert faults("keep", 8) > 4 * _PAGES

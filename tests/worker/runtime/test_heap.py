"""Memory that is taken and freed again and again costs page faults once."""

import platform

import pytest

from bench.support.preloaded import Preloaded
from support.script import run_script

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


def faults(preloaded: Preloaded, setting: str, mebibytes: int) -> int:
    """Page faults of ten rounds that take and free blocks of so many MiB."""
    return int(run_script(preloaded, SCRIPT, setting, str(mebibytes))[0])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept(preloaded: Preloaded) -> None:
    assert faults(preloaded, "keep", 2) < _PAGES
    assert faults(preloaded, "leave", 2) > 4 * _PAGES


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_large_blocks_go_back_to_the_kernel(preloaded: Preloaded) -> None:
    assert faults(preloaded, "keep", 8) > 4 * _PAGES

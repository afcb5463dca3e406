"""Memory that is taken and freed again and again costs page faults once."""

import platform
import subprocess
import sys

import pytest

_PAGES = 2048  # of 4 KiB in a block of 8 MiB
SCRIPT = """
import ctypes, resource, sys
from oobleck.worker.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(8 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 8 << 20)
    for block in blocks:
        libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setting: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, setting], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept() -> None:
    assert faults("keep") < _PAGES
    assert faults("leave") > 4 * _PAGES

"""The master's heap: when it is searched for cycles of objects that nobody has any more, who takes
memory from it, and when its free memory goes back."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from oobleck.master.process import short_collections

FAR_AHEAD_S = 1e6


class Loop:
    """Refers to itself, so only a collection can free it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def left_out() -> Iterator[None]:
    """What was loaded is left out of collections of other tests."""
    yield
    gc.freeze()


def test_a_collection_leaves_out_what_outlived_one_until_all_is_looked_through() -> None:
    clock = [0.0]
    with short_collections(lambda: clock[0]):
        old = Loop()
        gc.collect()
        assert gc.get_freeze_count() > 0
        young = Loop()
        old_lives, young_lives = weakref.ref(old), weakref.ref(young)
        del old, young
        gc.collect()
        assert old_lives() is not None
        assert young_lives() is None
        clock[0] = FAR_AHEAD_S
        gc.collect()
        assert old_lives() is None
    assert gc.get_freeze_count() == 0
    assert not [hook for hook in gc.callbacks if "short_collections" in repr(hook)]


#: The C library tells of each heap in a line of XML.
HEAPS = """
import ctypes, sys, tempfile, threading
from pathlib import Path
from oobleck.master.process import share_heap

if sys.argv[1] == "shared":
    share_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
go_on = threading.Barrier(5)

def take():
    assert libc.malloc(ctypes.c_size_t(5000))
    go_on.wait()
    go_on.wait()

threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
go_on.wait()
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "told"
    told = ctypes.c_void_p(libc.fopen(str(path).encode(), b"w"))
    libc.malloc_info(0, told)
    libc.fclose(told)
    print(path.read_text().count("<heap nr="))
go_on.wait()
"""


def test_all_threads_take_memory_from_one_heap() -> None:
    def heaps(how: str) -> int:
        command = [sys.executable, "-c", HEAPS, how]
        told = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        return int(told.stdout)

    assert heaps("shared") == 1
    assert heaps("not") > 1

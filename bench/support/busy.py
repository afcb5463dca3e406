"""Load on all cores, beside whatever is measured.

A process whose `main` is this module's is the load on one core: it computes until it is ended.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import NoReturn

from bench.support.daemons import CHECKOUT, with_parent


@contextlib.contextmanager
def all_cores_busy() -> Iterator[None]:
    """Load all cores until the end of the block, or of the thread that entered it."""
    environment = {**os.environ, "PYTHONPATH": CHECKOUT}
    loops = [
        subprocess.Popen(with_parent("bench.support.busy"), env=environment)
        for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> NoReturn:
    while True:
        pass

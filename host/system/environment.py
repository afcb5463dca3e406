"""Clocks and randomness, which a process takes from outside.

Built once and passed down. A daemon with the same environment repeats its run, so that the
simulation plays a whole cluster from a seed.
"""

import os
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    #: Seconds since some moment; never jumps. All spans are measured by it.
    now: Callable[[], float] = time.monotonic
    #: Unix time, which may jump: for people.
    unix: Callable[[], float] = time.time
    #: Unguessable hexadecimal text of so many bytes, never the same twice.
    token: Callable[[int], str] = secrets.token_hex
    #: Process id of this process.
    pid: Callable[[], int] = os.getpid
    #: Random number from the first to the second one.
    uniform: Callable[[float, float], float] = random.uniform

"""What a process of a drill does first: Python loads this at its start where the folder is on
PYTHONPATH.

`BENCH_CLOCK` names a file with the seconds, as a double, that `time.time` is off by. Decisions must
not depend on it: that is what jumps of the clock are to show.

Where the socket of `bench.support.preloaded` lies beside this file, an agent's warm process does
not load its libraries. It has one forked that has them, and lives and ends together with that one.
"""

import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

_WARM = "oobleck.worker.warm"
_time = time.time
_offset: mmap.mmap | bytes = bytes(8)


def follow_clock(path: str) -> None:
    """From now on `time.time` is off by what the file says."""
    global _offset
    with open(path, "r+b") as file:
        _offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)


def _shifted() -> float:
    return _time() + float(struct.unpack_from("d", _offset)[0])


def stand_in(address: Path, parent_pid: int) -> NoReturn:
    """Have the warm process forked, with this one's files, network and environment.

    This process ends with the agent, and its end closes a pipe by which the kernel kills the
    forked one. The other way round it ends in the same manner as the forked one.
    """
    from oobleck.host.system.process import die_with_parent

    die_with_parent(parent_pid)
    alive, _held_open = os.pipe()
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(address))
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    socket.send_fds(server, [b"."], [0, 1, 2, network, alive])
    server.sendall(json.dumps([dict(os.environ), os.getcwd()]).encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(alive)
    answers = server.makefile()
    # Where others look for the forked one.
    Path("/proc/self/comm").write_text(f"warm {answers.readline().strip()}")
    code = os.waitstatus_to_exitcode(int(answers.readline() or signal.SIGKILL))
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if "BENCH_CLOCK" in os.environ:
    follow_clock(os.environ["BENCH_CLOCK"])
    time.time = _shifted
    time.time_ns = lambda: int(_shifted() * 1e9)

_address = Path(__file__).with_name("preloaded")
if _WARM in sys.orig_argv and _address.exists():
    stand_in(_address, int(sys.orig_argv[sys.orig_argv.index(_WARM) - 1]))

"""What a process of a drill does first: Python loads this at its start where the folder is on
PYTHONPATH.

`BENCH_CLOCK` names a file with the seconds, as a double, that `time.time` is off by. Decisions must
not depend on it: that is what jumps of the clock are to show.

Where the socket of `bench.support.preloaded` lies beside this file, a process of `_FORKED` does not
load its libraries. It has one forked that has them, and lives and ends together with that one. So
do the `oobleck` command, and the daemons of `_DAEMONS` where `BENCH_FORK_DAEMONS` is set: who
starts them looks for the forked process (`bench.support.daemons.forked`).
"""

import contextlib
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

#: Modules that are forked: an agent's warm process, the check of a user's model, a master's
#: planner, and processes of tests.
_FORKED = (
    "oobleck.worker.warm",
    "oobleck.worker.describe",
    "oobleck.master.planning.worker",
    "support.testing",
)
_DAEMONS = ("oobleck.master", "oobleck.agent")
_time = time.time
_offset: mmap.mmap | bytes = bytes(8)


def follow_clock(path: str) -> None:
    """Shift `time.time` by the offset in the file, from now on."""
    global _offset
    with open(path, "r+b") as file:
        _offset = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def _shifted() -> float:
    return _time() + float(struct.unpack_from("d", _offset)[0])


def stand_in(address: Path, parent_pid: int, module: str, arguments: list[str]) -> NoReturn:
    """Have the module's process forked, with this one's files, network, folder and environment.

    This process ends with its parent, and its end closes a pipe by which the kernel kills the
    forked one. The other way round it ends in the same manner as the forked one. It passes on the
    signals by which daemons are ended.
    """
    from oobleck.host.system.process import die_with_parent

    die_with_parent(parent_pid)
    # Do not pass on Python's own files.
    opened = sorted(map(int, os.listdir("/proc/self/fd")))
    numbers = [n for n in opened if n < 3 or _is_inherited(n)]
    alive, _held_open = os.pipe()
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(address))
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    socket.send_fds(server, [b"."], [*numbers, network, alive])
    asked = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "files": numbers,
    }
    server.sendall(json.dumps(asked).encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    for number in numbers:
        os.dup2(null, number)
    os.close(alive)
    answers = server.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: _pass_on(pid, number))
    # Let others find the forked process by this name.
    Path("/proc/self/comm").write_text(f"fork {pid}")
    code = os.waitstatus_to_exitcode(int(answers.readline() or signal.SIGKILL))
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if "BENCH_CLOCK" in os.environ:
    follow_clock(os.environ["BENCH_CLOCK"])
    time.time = _shifted
    time.time_ns = lambda: int(_shifted() * 1e9)


def _stand_in_if_forked(address: Path) -> None:
    """Stand in if this process runs the command, or such a module that ends with its parent."""
    called = sys.orig_argv
    # Another user's processes cannot be forked.
    if not address.exists() or address.stat().st_uid != os.getuid():
        return
    if len(called) > 1 and Path(called[1]).name == "oobleck":
        stand_in(address, os.getppid(), "oobleck.cli.main", called[2:])
    daemons = _DAEMONS if "BENCH_FORK_DAEMONS" in os.environ else ()
    for module in (*_FORKED, *daemons):
        if module in called and called[(place := called.index(module)) - 1].isdigit():
            main = f"{module}.__main__" if module in _DAEMONS else module
            stand_in(address, int(called[place - 1]), main, called[place + 1 :])


_stand_in_if_forked(Path(__file__).with_name("preloaded"))

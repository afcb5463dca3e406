"""One process that has a worker's libraries loaded, and forks the warm processes of all agents of a
run. Else each of them loads the libraries, which takes two seconds of a core or more.

For tests that start and kill many nodes. What they prove is the same: each warm process is the real
code in a process of its own, in its agent's network and environment; it can be killed, and dies
with its agent. But it is no child of the agent. A process that stands for it is
(`bench/startup/sitecustomize.py`), and `bench.support.daemons` finds the one by the other. What
looks at the process table itself, as `oobleck chaos` does, needs a cluster without this.

Its standard input is the listening socket.
"""

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NoReturn

from bench.support.daemons import CHECKOUT, with_parent
from oobleck.host.device import worker_environment

#: What is on PYTHONPATH of processes whose start is a drill's.
STARTUP = Path(__file__).parents[1] / "startup"
_CLONE_NEWNET = 0x40000000
_BACKLOG = 100
_MOST_FILES = 4096


class Preloaded:
    """The process, from the first cluster's start to the end of the context."""

    def __enter__(self) -> "Preloaded":
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        #: What the daemons of a cluster get as PYTHONPATH, to make use of this.
        self.python_path = str(folder)
        (folder / "sitecustomize.py").symlink_to(STARTUP / "sitecustomize.py")
        clock = folder / "clock"
        clock.write_bytes(struct.pack("d", 0.0))
        places = os.pathsep.join((str(STARTUP), CHECKOUT))
        own = {"PYTHONPATH": places, "BENCH_CLOCK": str(clock)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "preloaded"))
            listener.listen(_BACKLOG)
            self._process = subprocess.Popen(
                with_parent("bench.support.preloaded"),
                stdin=listener.fileno(),
                env={**os.environ, **worker_environment("cpu"), **own},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def serve(listener: socket.socket) -> NoReturn:
    """Fork a warm process for each that connects, and tell it the pid and later the status."""
    import oobleck.worker.warm  # noqa: F401

    gc.collect()
    gc.freeze()
    forked: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([listener.fileno(), *forked], [], [])
        for ended in forked.keys() & set(ready):
            pid, asker = forked.pop(ended)
            os.close(ended)
            with asker:
                _tell(asker, os.waitpid(pid, 0)[1])
        if listener.fileno() in ready:
            asker, _ = listener.accept()
            _, files, _, _ = socket.recv_fds(asker, 1, 5)
            if (pid := os.fork()) == 0:
                become_warm(asker, files)
            for file in files:
                os.close(file)
            forked[os.pidfd_open(pid)] = (pid, asker)
            _tell(asker, pid)


def _tell(asker: socket.socket, number: int) -> None:
    try:
        asker.sendall(f"{number}\n".encode())
    except OSError:  # it was killed, and so is the one forked for it
        return


def become_warm(asker: socket.socket, files: list[int]) -> NoReturn:
    """In the fork: run as the warm process that was asked for. `files`: its standard ones, its
    network, and a pipe that is closed when it is to end."""
    import sitecustomize  # type: ignore[import-not-found]  # of STARTUP, which is on PYTHONPATH

    from oobleck.worker import warm

    *standard, network, alive = files
    with asker.makefile() as lines:
        environment, folder = json.loads(lines.readline())
    for number, file in enumerate(standard):
        os.dup2(file, number)
    if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.closerange(3, alive)
    os.closerange(alive + 1, _MOST_FILES)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "BENCH_CLOCK" in environment:
        sitecustomize.follow_clock(environment["BENCH_CLOCK"])
    # The kernel kills this process when the pipe is closed, whatever it does then.
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC | fcntl.fcntl(alive, fcntl.F_GETFL))
    if select.select([alive], [], [], 0)[0]:  # it was closed before
        os._exit(1)
    warm.main()
    os._exit(0)


def main() -> NoReturn:
    serve(socket.socket(fileno=os.dup(0)))

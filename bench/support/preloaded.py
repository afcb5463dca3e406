"""Process with the libraries of workers and of the command line loaded, which forks processes of a
run that need them.

These are the warm processes of agents, checks of users' models, masters' planners, the `oobleck`
command, and daemons of clusters. Otherwise each would load the libraries, for half a second to six
seconds of a core.

It is for tests that start and kill many nodes. They prove the same: each fork is the real code in a
process of its own, with the intended network, folder, files and environment; it can be killed, and
dies with its parent. But it is not a child of that parent: a stand-in process is
(`bench/startup/sitecustomize.py`), by which `bench.support.daemons` finds the fork. Code that reads
the process table itself, as `oobleck chaos` does, needs a cluster without this.

Its standard input is the listening socket.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bench.support.daemons import CHECKOUT, with_parent
from oobleck.host.gpu.devices import worker_environment
from oobleck.host.programs import refuse_older_tls, run

#: What is on PYTHONPATH of processes whose start is a drill's.
STARTUP = Path(__file__).parents[1] / "startup"
#: A file beside the socket that is there once all is loaded.
_LOADED = "loaded"
_LOADED_S = 240.0
_CLONE_NEWNET = 0x40000000
_BACKLOG = 100
_WARM = "oobleck.worker.warm"
#: How nice workers are: they train as fast as they can while a test asks and waits.
_NICE = 10
#: Jobs of at least so many steps go on until they are cancelled. A step of theirs takes so long,
#: for most of which the processor is free.
_ENDLESS, _STEP_S = 10_000, 0.1
#: More than a process inherits, with its network and a pipe.
_MOST_FILES = 100
#: Above the numbers that a fork's files get.
_HIGH = 1000


class Preloaded:
    """The process, until the end of the context; or that of another process, for its part of a run.

    `python_path` is what the daemons of a cluster get as PYTHONPATH, to make use of it.
    """

    def __init__(self, python_path: str = "") -> None:
        """`python_path`: of the one that another process has started; empty: start one."""
        self.python_path = python_path
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Preloaded":
        if not self.python_path:
            self._start()
        return self

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self.python_path = str(folder)
        (folder / "sitecustomize.py").symlink_to(STARTUP / "sitecustomize.py")
        clock = folder / "clock"
        clock.write_bytes(struct.pack("d", 0.0))
        places = os.pathsep.join((str(STARTUP), CHECKOUT))
        # gRPC prints nothing, as where programs load it.
        own = {"PYTHONPATH": places, "BENCH_CLOCK": str(clock), "GRPC_VERBOSITY": "NONE"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "preloaded"))
            listener.listen(_BACKLOG)
            self._process = subprocess.Popen(
                with_parent("bench.support.preloaded"),
                stdin=listener.fileno(),
                env={**os.environ, **worker_environment("cpu"), **own},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return once it has loaded all, so that nothing that is forked has a slow start."""
        deadline = time.monotonic() + _LOADED_S
        while not (Path(self.python_path) / _LOADED).exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the process that forks others does not come up")
            time.sleep(0.01)

    def start(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        files: Sequence[int],
        timeout_s: float,
    ) -> "Started":
        """Have a process forked that calls the module's `main`. `files`: its standard ones;
        `timeout_s`: how long it is waited for."""
        asked = {
            "module": module,
            "arguments": arguments,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "path": [*filter(None, sys.path)],
            "files": [0, 1, 2],
        }
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(timeout_s)
        server.connect(str(Path(self.python_path) / "preloaded"))
        alive, held_open = os.pipe()
        with open("/proc/self/ns/net") as network:
            socket.send_fds(server, [b"."], [*files, network.fileno(), alive])
        os.close(alive)
        server.sendall(json.dumps(asked).encode() + b"\n")
        return Started(server, held_open)

    def run(
        self, module: str, *arguments: str, environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Call the module's `main` in a fork, to its end. Raises TimeoutExpired, and has then
        killed it."""
        with (
            open(os.devnull) as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as errors,
        ):
            files = [nothing.fileno(), out.fileno(), errors.fileno()]
            started = self.start(
                module, *arguments, environment=environment, files=files, timeout_s=timeout_s
            )
            try:
                code = started.wait()
            except TimeoutError:
                raise subprocess.TimeoutExpired(arguments, timeout_s) from None
            finally:
                started.close()
            for file in (out, errors):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._folder.cleanup()


class Started:
    """A forked process, killed where it still runs when this is closed."""

    def __init__(self, server: socket.socket, held_open: int) -> None:
        """`held_open`: the end of a pipe; the process is killed once it is closed."""
        self._server, self._held_open = server, held_open

    def wait(self) -> int:
        """Its exit code. Raises TimeoutError."""
        with self._server.makefile() as answers:
            answers.readline()  # the pid
            return os.waitstatus_to_exitcode(int(answers.readline()))

    def close(self) -> None:
        os.close(self._held_open)
        self._server.close()


def serve(listener: socket.socket) -> NoReturn:
    """Fork a process for each that connects, and tell it the pid and later the status."""
    refuse_older_tls()
    import scipy.optimize  # noqa: F401  # which the planner loads when it needs it

    import oobleck.agent.__main__
    import oobleck.master.__main__
    import oobleck.master.planning.worker
    import oobleck.worker.describe
    import oobleck.worker.warm  # noqa: F401
    from oobleck.cli.main import COMMANDS
    from oobleck.worker.models import registry

    registry.load("huggingface")
    for where, _ in COMMANDS.values():
        importlib.import_module(where.partition(":")[0])
    gc.collect()
    gc.freeze()
    Path(listener.getsockname()).with_name(_LOADED).touch()
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
            _, files, _, _ = socket.recv_fds(asker, 1, _MOST_FILES)
            if (pid := os.fork()) == 0:
                become(asker, files)
            for file in files:
                os.close(file)
            forked[os.pidfd_open(pid)] = (pid, asker)
            _tell(asker, pid)


def _tell(asker: socket.socket, number: int) -> None:
    try:
        asker.sendall(f"{number}\n".encode())
    except OSError:  # it was killed, and so is the one forked for it
        return


def become(asker: socket.socket, files: list[int]) -> NoReturn:
    """In the fork: run the module that was asked for. `files`: its own, its network, and a pipe
    that is closed when it is to end."""
    import sitecustomize  # type: ignore[import-not-found]  # of STARTUP, which is on PYTHONPATH

    with asker.makefile() as lines:
        asked = json.loads(lines.readline())
    *own, network, alive = (fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files)
    os.closerange(3, _HIGH)
    for number, file in zip(asked["files"], own, strict=True):
        os.dup2(file, number)
        os.close(file)
    if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    os.setsid()
    if asked["module"] == _WARM:
        _let_others_go_first()
        _pace()
    _show_as(["python", "-m", asked["module"], *asked["arguments"]])
    os.chdir(asked["folder"])
    environment = asked["environment"]
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
    sys.path[:] = asked["path"]
    sys.argv = [asked["module"], *asked["arguments"]]
    status = 0
    try:
        run(asked["module"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as at the end of any process
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to free what is loaded takes half a second


def _show_as(command: Sequence[str]) -> None:
    """Have others see this command as the process's own, as far as that has room: a submission
    looks whether the agents are processes of its host."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[45:47])  # where the command lies in memory
    shown = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))


def _let_others_go_first() -> None:
    """Have each worker of this warm process, which begins a session of its own, be nice. The kernel
    may share out the processors by session."""
    begin = os.setsid

    def begin_session() -> None:
        begin()
        with contextlib.suppress(OSError):
            os.nice(_NICE)
            Path("/proc/self/autogroup").write_text(str(_NICE))

    os.setsid = begin_session


def _pace() -> None:
    """Have workers of endless jobs begin a step every `_STEP_S`, rather than take all that other
    processes leave of the processors."""
    from oobleck.worker.step.executor import Executor

    run_step = Executor.run_step
    began = 0.0

    def run_in_time(self: Executor, step: int, redo: Any = None) -> Any:
        nonlocal began
        if self._training.steps >= _ENDLESS:
            time.sleep(max(0.0, began + _STEP_S - time.monotonic()))
        began = time.monotonic()
        return run_step(self, step, redo)

    Executor.run_step = run_in_time  # type: ignore[method-assign]


def main() -> NoReturn:
    serve(socket.socket(fileno=os.dup(0)))

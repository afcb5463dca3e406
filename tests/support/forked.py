"""The programs in a fork of a process that has its modules loaded.

Loading them takes a third of a second of a core for each of some hundred starts. What runs is the
same `main`, in a process of its own, with the arguments, folder and environment that it is given.
Nothing in the first process talks to anybody: gRPC must not be in use where a process forks.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal, TextIO

import pytest

from oobleck.cli.main import COMMANDS
from support.waiting import PATIENCE_S

_MAIN = {
    "oobleck": "oobleck.cli.main",
    "oobleck-master": "oobleck.master.__main__",
    "oobleck-agent": "oobleck.agent.__main__",
    "standin-agent": "support.standin_agent",
}


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    verbs = [where.partition(":")[0] for where, _ in COMMANDS.values()]
    # Its modules are those of the agent, and its folder is not on the server's path.
    programs = [module for program, module in _MAIN.items() if program != "standin-agent"]
    # The dashboard's libraries are loaded when it starts.
    dashboard = ["oobleck.cli.dashboard.app", "uvicorn"]
    context.set_forkserver_preload([*programs, *verbs, *dashboard])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPC_VERBOSITY", "NONE")  # as `main` does before gRPC is loaded
        forkserver.ensure_running()
    return context


def _main(
    program: str,
    arguments: tuple[str, ...],
    folder: str,
    environment: Mapping[str, str],
    output: tuple[str, str],
) -> None:
    os.setsid()  # who would end all of its group must not end the first process
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [nothing, *(os.open(path, os.O_WRONLY | os.O_APPEND) for path in output)]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(os.dup(0))  # multiprocessing has closed its own
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    importlib.import_module(_MAIN[program]).main()


class Forked:
    """A program that goes on; what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        errors: Path | None = None,
        read: Literal["stdout", "stderr", ""] = "stdout",
    ) -> None:
        """`errors`: the file to which what it writes to standard error is added; None: nowhere.
        `read`: the file of its two that is a pipe to this process; empty: none."""
        #: Its standard output and error, where they are read here.
        self.stdout: TextIO | None = None
        self.stderr: TextIO | None = None
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "pipe")
            os.mkfifo(pipe)
            output = pipe if read == "stdout" else os.devnull
            error = pipe if read == "stderr" else str(errors or os.devnull)
            self._process = _server().Process(
                target=_main,
                args=(program, arguments, os.getcwd(), dict(os.environ), (output, error)),
                daemon=True,  # ends with the tests, whatever they forget
            )
            if errors is not None:
                errors.touch()
            self._process.start()
            if read:  # waits until the process has it open too
                setattr(self, read, open(pipe))  # noqa: SIM115
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or less than 0: by that signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None, "without one it has ended"
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Do nothing where it has ended, as `subprocess` does."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    program: str, *arguments: str, timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str]:
    """One of the three programs, to its end. Raises TimeoutExpired, and has then killed it."""
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as errors:
        process = _server().Process(
            target=_main,
            args=(program, arguments, os.getcwd(), dict(os.environ), (out.name, errors.name)),
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout_s, out.read(), errors.read())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())

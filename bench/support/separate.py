"""Cluster whose master and agents are started one by one, as an operator does by hand."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from bench.support.cluster import Cluster
from bench.support.daemons import FORK_DAEMONS, alive, forked, with_parent
from bench.support.ports import choose_address
from bench.support.preloaded import Preloaded

#: Time for a daemon to end after a signal.
_ENDS_S = 240.0


class Daemons(Cluster):
    """Master and agents, each started by itself as on a machine of its own."""

    def __init__(self, folder: Path, preloaded: Preloaded | None = None) -> None:
        """`folder`: a new one, for the state directory, job files and logs. `preloaded`: starts
        daemons, workers' warm processes and commands."""
        folder.mkdir()
        super().__init__(folder / "state", folder)
        self.preloaded = preloaded
        #: Environment of the next daemon, which decides its release.
        self.environment: Mapping[str, str] = {}
        if preloaded is not None:
            preloaded.wait()
            self.python_path = preloaded.python_path
            self.environment = {"PYTHONPATH": preloaded.python_path, **FORK_DAEMONS}
        self._started: list[subprocess.Popen[str]] = []
        #: Daemons, by the pid of the process that does the work.
        self._working: dict[int, subprocess.Popen[str]] = {}

    def _start(self, *command: str) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            daemon = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
            )
        self._started.append(daemon)
        return daemon

    def run_master(self, *options: str) -> subprocess.Popen[str]:
        """Start a master, which may refuse to start."""
        listen = ("--listen", self.address or choose_address(), "--state-dir", str(self.state_dir))
        return self._start(*with_parent("oobleck.master"), *listen, *options)

    def start_master(self, *options: str) -> None:
        """Start a master at the address of the last one, if there was one, and wait until it
        listens."""
        daemon = self.run_master(*options)
        assert daemon.stdout is not None
        line = daemon.stdout.readline()
        assert line.startswith("listening on "), line + self.tail()
        self.address, self.master_pid = line.split()[-1], self._pid(daemon)

    def start_node(self, name: str, *options: str) -> int:
        command = (*with_parent("oobleck.agent"), "--master", self.address, "--name", name)
        self.agents[name] = self._pid(self._start(*command, *options))
        return self.agents[name]

    def _pid(self, daemon: subprocess.Popen[str]) -> int:
        pid = forked(daemon.pid) if FORK_DAEMONS.items() <= self.environment.items() else daemon.pid
        self._working[pid] = daemon
        return pid

    def kill_master(self) -> None:
        """Kill the master by SIGKILL."""
        os.kill(self.master_pid, signal.SIGKILL)
        self.code(self.master_pid)
        self.master_pid = 0

    def end(self, pid: int) -> None:
        """End a daemon by SIGTERM, as a service manager does, and wait for it."""
        os.kill(pid, signal.SIGTERM)
        self.code(pid)

    def code(self, pid: int) -> int:
        """Wait for a daemon to end; return its exit code."""
        return self._working[pid].wait(_ENDS_S)

    def roots(self) -> list[int]:
        return [daemon.pid for daemon in self._started]

    def check(self) -> None:
        assert not self.master_pid or alive(self.master_pid), self.tail()

    def close(self) -> None:
        self.hang_up()
        left = self.processes()
        for daemon in reversed(self._started):
            daemon.send_signal(signal.SIGINT)
        for daemon in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            assert daemon.stdout is not None
            daemon.stdout.close()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self._started:
            daemon.wait()

"""A cluster of which every daemon is on a host of its own, in a network whose links can fail.

The same daemons as `oobleck local` starts, each in its network namespace, started here one by one
so that each can be killed, stopped and started again like a machine. For fault tests and the soak.
"""

import contextlib
import json
import os
import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.support.client import ClusterError
from bench.support.cluster import Cluster
from bench.support.daemons import alive, with_parent
from bench.support.network import Network
from bench.support.preloaded import STARTUP, Preloaded
from bench.support.scratch import mount_memory, run_folder, undisturbed, unmount
from oobleck.cli.cluster.authority import issue, make_authority
from oobleck.host.security.credentials import OPERATOR

HEAD = "head"
PORT = 7070
#: Agents give their workers 2 s.
_STOP_S = 15.0
_POLL_S = 0.1


class NetCluster(Cluster):
    """Cluster in network namespaces; a context manager that leaves nothing behind."""

    def __init__(
        self,
        nodes: int,
        *,
        state_dir: Path | None = None,
        workers_per_node: int = 1,
        fault_plan: Sequence[Mapping[str, object]] = (),
        master_options: Sequence[str] = (),
        bytes_per_s: int | None = None,
        state_mb: int = 64,
        preloaded: Preloaded | None = None,
        around: Mapping[str, Sequence[str]] | None = None,
        node_options: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`bytes_per_s`: of every host's link; `state_mb`: of the disk that the state directory is
        on, so that it can be filled. `around`: by host, the beginning of a command that becomes its
        daemon; `node_options`: more options of a node's agent."""
        with ExitStack() as run:
            folder = run.enter_context(run_folder())
            super().__init__(state_dir or folder / "state", folder)
            mount_memory(self.state_dir, state_mb)
            # Unmount even if workers that were just killed still have files open.
            run.callback(unmount, self.state_dir)
            names = [f"n{number}" for number in range(1, nodes + 1)]
            self.net = run.enter_context(Network([HEAD, *names], bytes_per_s))
            self._run = run.pop_all()
        self.preloaded = preloaded
        self.python_path = preloaded.python_path if preloaded is not None else str(STARTUP)
        self._master_options = tuple(master_options)
        self._fault_plan = folder / "faults.json"
        self._fault_plan.write_text(json.dumps(list(fault_plan)))
        memory = psutil.virtual_memory().total // (nodes * workers_per_node)
        self._agent_options = (
            "--workers-per-node",
            str(workers_per_node),
            "--memory-per-worker",
            f"{memory}",
        )
        self._around, self._node_options = around or {}, node_options or {}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._master: subprocess.Popen[bytes] | None = None
        self._pki = self.state_dir / "pki"
        self.credentials = self._pki / OPERATOR
        try:
            # Beyond loopback all traffic needs credentials.
            make_authority(self._pki, ())
            self.address = f"{self.net.address(HEAD)}:{PORT}"
            self.start_master()
            for name in names:
                self.start_node(name)
            self.wait(lambda: self.live() == set(names), f"{nodes} nodes", poll_s=0.1)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "NetCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def set_clock(self, host: str, offset_s: float) -> None:
        """Shift the wall clock of all processes on the host, from now on."""
        path = self._scratch / f"clock-{host}"
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(struct.pack("d", offset_s))

    def _environment(self, host: str) -> dict[str, str]:
        self.set_clock(host, 0.0)
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "BENCH_CLOCK": str(self._scratch / f"clock-{host}"),
            "PYTHONPATH": self.python_path,
        }

    # ---- daemons

    def start_master(self) -> int:
        """Start the master; return once it listens."""
        # Without quarantine, since drills fail nodes on purpose and often.
        arguments = ["--listen", self.address, "--state-dir", str(self.state_dir)]
        arguments += ["--quarantine-s", "0"]
        master = self._start(HEAD, "oobleck.master", *arguments, *self._master_options, piped=True)
        assert master.stdout is not None, "opened as a pipe"
        line = master.stdout.readline().decode()
        master.stdout.close()
        if not line.startswith("listening on "):
            raise ClusterError(f"the master did not start:\n{self.tail()}")
        self._master, self.master_pid = master, master.pid
        return master.pid

    def start_node(self, name: str, *options: str) -> int:
        options = (*self._node_options.get(name, ()), *options)
        arguments = [*self._identity(name), *self._agent_options, *options]
        arguments += ["--fault-plan", str(self._fault_plan)]
        self.agents[name] = self._start(name, "oobleck.agent", *arguments).pid
        return self.agents[name]

    def start_twin(self, host: str, name: str) -> subprocess.Popen[bytes]:
        """Start a second agent called `name`, on `host`; it must end by itself."""
        return self._start(host, "oobleck.agent", *self._identity(name))

    def _identity(self, name: str) -> list[str]:
        folder = self._pki / "nodes" / name
        if not folder.exists():
            issue(self._pki, folder, "agent", name)
        clock = ("--pass-env", "BENCH_CLOCK")
        return ["--master", self.address, "--name", name, "--credentials", str(folder), *clock]

    def _start(
        self, host: str, module: str, *arguments: str, piped: bool = False
    ) -> subprocess.Popen[bytes]:
        command = [*self.net.on(host), *self._around.get(host, ())]
        command += [*with_parent(module), *arguments]
        with self.log.open("a") as log:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=self._environment(host),
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def kill_master(self) -> None:
        assert self._master is not None, "it was started"
        self._master.kill()
        self._master.wait()
        self._master = None

    def check(self) -> None:
        if self._master is not None and self._master.poll() is not None:
            raise ClusterError(f"the master ended with {self._master.returncode}")

    def roots(self) -> list[int]:
        return [daemon.pid for daemon in self._daemons if daemon.poll() is None]

    # ---- processes

    def orphans(self) -> list[str]:
        """Return the processes on the hosts that belong to no running daemon.

        Those whose parent has just died need a moment to die with it, so look repeatedly.
        """
        there = self.net.processes()  # before those of the daemons, which may start more meanwhile
        known = {process.pid for process in self.processes()}
        found = []
        for pid in there:
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid not in known and alive(pid):
                    found.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())}")
        return found

    def stop(self) -> None:
        """Stop the agents first, as an operator would, then kill the remaining processes."""
        self.hang_up()
        with undisturbed(), self._run:
            self.net.heal()
            for daemon in reversed(self._daemons):
                if daemon.poll() is None:
                    daemon.send_signal(signal.SIGCONT)
                    daemon.send_signal(signal.SIGINT)  # SIGTERM would drain the nodes first
            for daemon in self._daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(_STOP_S)
            deadline = time.monotonic() + _STOP_S
            while (left := self.orphans()) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        for daemon in self._daemons:
            daemon.wait()
        if left:
            raise ClusterError(f"left behind after the daemons' ends: {left}")

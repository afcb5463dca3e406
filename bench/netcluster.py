"""A cluster of which every daemon is on a host of its own, in a network whose links can fail.

The same daemons as `oobleck local` starts, each in its network namespace, started here one by one
so that each can be killed, stopped and started again like a machine. For fault tests and the soak.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from bench.cluster import BIN, Cluster, ClusterError
from bench.network import Network
from oobleck.cli.authority import OPERATOR, issue, make_authority

HEAD = "head"
PORT = 7070
#: Agents give their workers 2 s.
_STOP_S = 15.0

FaultPlan = Sequence[Mapping[str, object]]


class NetCluster(Cluster):
    """A context manager that leaves nothing."""

    def __init__(
        self,
        nodes: int,
        *,
        state_dir: Path | None = None,
        workers_per_node: int = 1,
        fault_plan: FaultPlan = (),
        master_options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment`: added to that of every daemon."""
        self._folder = tempfile.TemporaryDirectory(prefix="oobleck-")
        scratch = Path(self._folder.name)
        super().__init__(state_dir or scratch / "state", scratch)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._master_options = tuple(master_options)
        self._fault_plan = scratch / "faults.json"
        self._fault_plan.write_text(json.dumps(list(fault_plan)))
        memory = psutil.virtual_memory().total // (nodes * workers_per_node)
        self._agent_options = (
            "--workers",
            str(workers_per_node),
            "--memory-per-worker",
            f"{memory}",
        )
        self._pki = self.state_dir / "pki"
        make_authority(self._pki, ())
        self.credentials = self._pki / OPERATOR
        names = [f"n{number}" for number in range(1, nodes + 1)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._master: subprocess.Popen[bytes] | None = None
        self.net = Network([HEAD, *names])
        try:
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

    # ---- daemons

    def start_master(self) -> int:
        """Returns once it listens."""
        arguments = ["--listen", self.address, "--state-dir", str(self.state_dir)]
        master = self._start(HEAD, "oobleck-master", *arguments, *self._master_options, piped=True)
        assert master.stdout is not None, "opened as a pipe"
        line = master.stdout.readline().decode()
        master.stdout.close()
        if not line.startswith("listening on "):
            raise ClusterError(f"the master did not start:\n{self.tail()}")
        self._master, self.master_pid = master, master.pid
        return master.pid

    def start_node(self, name: str, *options: str) -> int:
        arguments = ["--master", self.address, "--name", name, *self._agent_options, *options]
        arguments += ["--fault-plan", str(self._fault_plan)]
        credentials = self._pki / "nodes" / name
        if not credentials.exists():
            issue(self._pki, credentials, "agent", name)
        arguments += ["--credentials", str(credentials)]
        self.agents[name] = self._start(name, "oobleck-agent", *arguments).pid
        return self.agents[name]

    def _start(
        self, host: str, program: str, *arguments: str, piped: bool = False
    ) -> subprocess.Popen[bytes]:
        command = [*self.net.on(host), str(BIN / program), *arguments, "--exit-with-parent"]
        with self.log.open("a") as log:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
                env=self._environment,
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

    def warm_pid(self, name: str) -> int:
        """The process that the node's workers are forked from."""
        (warm,) = psutil.Process(self.agents[name]).children()
        return warm.pid

    def orphans(self) -> list[str]:
        """Processes on the hosts that belong to no daemon that runs."""
        ours = {process.pid for process in self.processes()}
        found = []
        for pid in self.net.processes():
            if pid not in ours:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(f"{pid}: {' '.join(process.cmdline())}")
        return found

    def stop(self) -> None:
        """Agents first, as an operator would; then whatever is left by force."""
        self.net.heal()
        for daemon in reversed(self._daemons):
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGCONT)
                daemon.terminate()
        for daemon in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(_STOP_S)
        left = self.orphans()
        self.net.close()
        for daemon in self._daemons:
            daemon.wait()
        self._folder.cleanup()
        if left:
            raise ClusterError(f"left behind after the daemons' ends: {left}")

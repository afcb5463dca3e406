"""A cluster driven as an operator would, and what may be done to its processes.

Used by the demo, the benchmarks and the cluster tests. Knows the process table; what an operator
sees is in `bench.support.client`.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.support.client import Client, ClusterError
from bench.support.daemons import (
    FORK_DAEMONS,
    children_of,
    descendants,
    forked,
    kill_trees,
    real_process,
    with_parent,
)
from bench.support.ports import choose_address
from bench.support.preloaded import Preloaded
from bench.support.scratch import run_folder, undisturbed

#: Time until output of workers is in the job's logs.
_STACKS_S = 1.0
#: Time for daemons to end by themselves.
_STOP_S = 10.0


#: Time for which the kernel's lists may omit a child.
_CHILDREN_S = 10.0


class Cluster(Client, ABC):
    """Running cluster, and operations on it, wherever its processes run."""

    def __init__(self, state_dir: Path, scratch: Path) -> None:
        """`scratch`: a folder for job files."""
        super().__init__(state_dir, scratch)
        self.log = scratch / "cluster.log"
        self.agents: dict[str, int] = {}
        self.master_pid = 0

    @abstractmethod
    def roots(self) -> list[int]:
        """Return the processes from which all others of the cluster descend."""

    @abstractmethod
    def check(self) -> None:
        """Raise ClusterError if waiting is pointless."""

    @abstractmethod
    def start_node(self, name: str, *options: str) -> int:
        """Start one more agent, as on one more machine; return its pid."""

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this cluster."""
        return [process for pid in self.roots() for process in descendants(pid)]

    # ---- waiting

    def wait(
        self,
        condition: Callable[[], bool],
        what: str,
        timeout_s: float = 480,
        *,
        poll_s: float = 0.05,
    ) -> None:
        """Wait until `condition` holds. `poll_s`: longer for a condition that costs the cluster
        something."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"timed out waiting for {what}\n{self.report()}")
            try:
                self.check()
            except ClusterError as error:
                raise ClusterError(f"{error}, waiting for {what}\n{self.report()}") from error
            time.sleep(poll_s)

    def wait_step(self, job_id: str, step: int, timeout_s: float = 480) -> None:
        def reached() -> bool:
            end = self.end_of(job_id)
            if self.last_step(job_id) >= step:
                return True
            if end is not None:
                raise ClusterError(f"job {job_id} ended early: {end}\n{self.tail()}")
            return False

        self.wait(reached, f"step {step} of {job_id}", timeout_s)

    def wait_end(self, job_id: str, timeout_s: float = 480) -> str:
        """Wait until the job has ended; return its final state."""
        self.wait(lambda: self.end_of(job_id) is not None, f"the end of {job_id}", timeout_s)
        end = self.end_of(job_id)
        assert end is not None, "just seen"
        return str(end["event"])

    # ---- trouble

    def kill_node(self, name: str) -> list[int]:
        """SIGKILL the agent of a node together with everything it started."""
        return kill_trees(self.agents.pop(name))

    def kill_nodes(self, *names: str) -> list[int]:
        """SIGKILL all processes of several nodes at once."""
        return kill_trees(*(self.agents.pop(name) for name in names))

    def worker_pids(self) -> dict[str, int]:
        """Return the process of every worker, by "node/slot"."""
        return {
            f"{name}/{worker['slot']}": worker["pid"]
            for name, node in self.nodes().items()
            for worker in node["workers"]
        }

    def warm_pid(self, name: str) -> int:
        """Return the process that the node's workers are forked from. Raise ClusterError."""
        agent = self.agents[name]
        # The kernel's lists sometimes omit a child: then look at all processes, and try again.
        deadline = time.monotonic() + _CHILDREN_S
        while True:
            children = children_of(agent) or [
                child.pid for child in psutil.Process(agent).children()
            ]
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    return real_process(child)
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the agent of {name} has nothing to fork workers from yet; its children: "
                    f"{children}"
                )
            time.sleep(0.1)

    def worker_pids_of(self, name: str) -> list[int]:
        """Return the pids from the process table, since the master may be away. Raise
        ClusterError."""
        return children_of(self.warm_pid(name))

    def kill_worker(self, name: str, slot: int = 0) -> int:
        pid = self.worker_pids()[f"{name}/{slot}"]
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop the workers of a node within the context, and so all workers that wait for them."""
        workers = [psutil.Process(pid) for pid in self.worker_pids_of(name)]
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                worker.resume()

    def tail(self, lines: int = 40) -> str:
        return _tail(self.log, lines)

    def report(self) -> str:
        """Return everything that may explain why the newest job is stuck: its events, and the logs
        of daemons and workers, with the stacks of their threads."""
        for name in self.agents:
            with contextlib.suppress(ClusterError, ProcessLookupError):
                for pid in self.worker_pids_of(name):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        files = [(self.log, 40), *((path, 40) for path in sorted(self.state_dir.glob("log/*.log")))]
        jobs = sorted((self.state_dir / "jobs").glob("*"), key=lambda path: path.stat().st_mtime)
        for job in jobs[-1:]:
            files += [(job / "events.jsonl", 15), (job / "metrics.jsonl", 1)]
            files += [(path, 80) for path in sorted((job / "logs").glob("*.log"))]
        return "\n".join(f"---- {path}\n{_tail(path, lines)}" for path, lines in files)


class LocalCluster(Cluster):
    """Cluster of `oobleck local`; a context manager that leaves nothing behind.

    Its processes end with the thread that starts them.
    """

    def __init__(
        self,
        nodes: int,
        *,
        state_dir: Path | None = None,
        workers_per_node: int = 1,
        fault_plan: Sequence[Mapping[str, object]] = (),
        options: Sequence[str] = (),
        preloaded: Preloaded | None = None,
    ) -> None:
        self._run = ExitStack()
        scratch = self._run.enter_context(run_folder())
        super().__init__(state_dir or scratch / "state", scratch)
        self._extra: list[subprocess.Popen[str]] = []
        self.preloaded = preloaded
        if preloaded is not None:
            preloaded.wait()
            self.python_path = preloaded.python_path
        command = [*with_parent("oobleck.cli.main"), "local", "--nodes", str(nodes)]
        command += ["--workers-per-node", str(workers_per_node)]
        command += ["--listen", choose_address(), "--state-dir", str(self.state_dir)]
        self._faults: list[str] = []
        if fault_plan:
            path = scratch / "faults.json"
            path.write_text(json.dumps(list(fault_plan)))
            self._faults = ["--fault-plan", str(path)]
        # Without quarantine, since tests fail nodes on purpose and often.
        command += ["--master-flag=--quarantine-s=0", "--no-restart", *self._faults, *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._daemon_environment(),
                start_new_session=True,
            )
        try:
            self._await_ready()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_ready(self) -> None:
        assert self.process.stdout is not None, "opened as a pipe"
        for line in self.process.stdout:
            words = line.split()
            match words:
                case ["master", address, "pid", pid]:
                    self.address, self.master_pid = address, int(pid)
                case ["agent", name, "pid", pid]:
                    self.agents[name] = int(pid)
                case ["ready", *_]:
                    self.master_pid = self._working(self.master_pid)
                    self.agents = {name: self._working(pid) for name, pid in self.agents.items()}
                    return
                case _:
                    pass
        raise ClusterError(f"oobleck local ended early:\n{self.log.read_text()}")

    def stop(self) -> None:
        """Interrupt the cluster as by Ctrl-C, then kill the remaining processes."""
        self.hang_up()
        with undisturbed(), self._run:
            left = self.processes()
            daemons = [self.process, *self._extra]
            for daemon in daemons:
                if daemon.poll() is None:
                    daemon.send_signal(signal.SIGINT)
            for daemon in daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(timeout=_STOP_S)
                daemon.kill()
                daemon.wait()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def roots(self) -> list[int]:
        return [self.process.pid, *(extra.pid for extra in self._extra)]

    def check(self) -> None:
        if self.process.poll() is not None:
            raise ClusterError("oobleck local ended")

    def start_node(self, name: str, *options: str, environment: Mapping[str, str] = {}) -> int:
        """Start a node that has the fault plan too. `environment`: variables beside this
        process's."""
        command = [*with_parent("oobleck.agent"), "--master", self.address, "--name", name]
        command += [*self._faults, *options]
        with self.log.open("a") as log:
            agent = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                env={**self._daemon_environment(), **environment},
            )
        self._extra.append(agent)
        self.agents[name] = self._working(agent.pid)
        return self.agents[name]

    def _daemon_environment(self) -> dict[str, str]:
        return {**self.child_environment(), **(FORK_DAEMONS if self.preloaded else {})}

    def _working(self, daemon: int) -> int:
        return forked(daemon) if self.preloaded else daemon


def _tail(path: Path, lines: int) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])

"""A local cluster driven as an operator would: by the `oobleck` command, signals and files.

Used by the demo, the benchmarks and the cluster tests. Knows nothing of the inside: it reads
the files under the state directory, the process table, and what the command reads from the master,
without starting the command for it: that takes a third of a second of a core at every look.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from oobleck.cli import text
from oobleck.cli.client import Master, Unreachable
from oobleck.host.command import CommandFailed
from oobleck.host.endpoint import Endpoint, choose_endpoint

BIN = Path(sys.executable).parent
Record = dict[str, Any]
T = TypeVar("T")
#: For what workers write to come into the job's logs.
_STACKS_S = 1.0
#: Bytes; several times as long as lines of metrics are.
_LONGEST_LINE = 4096
#: For an answer that only reads.
_TRIES = 3
#: What ends a job.
ENDED = ("succeeded", "failed", "cancelled")


class ClusterError(RuntimeError):
    """The cluster did not do what it was asked to, in time."""


def read_lines(path: Path) -> list[Record]:
    """The whole lines of a .jsonl file that may be growing; [] when it is not there yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_line(path: Path) -> Record | None:
    """The last whole line of a .jsonl file that may be growing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
            whole, _, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return None
    line = whole.rpartition(b"\n")[2]
    return json.loads(line) if line else None


def kill_trees(*pids: int) -> list[int]:
    """SIGKILL processes and all their descendants, as when their machines die; returns the pids."""
    victims = [process for pid in pids for process in _descendants(pid)]
    # The workers first: the agent must not get to see and report their end.
    for victim in reversed(victims):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    return [victim.pid for victim in victims]


class Cluster(ABC):
    """A running cluster and what may be done to it, wherever its processes run."""

    def __init__(self, state_dir: Path, scratch: Path) -> None:
        """`scratch`: a folder for job files."""
        self.state_dir = state_dir
        self.log = scratch / "cluster.log"
        self.agents: dict[str, int] = {}
        self.address = ""
        #: The operator's; None: the cluster is in the clear, on this host.
        self.credentials: Path | None = None
        self.master_pid = 0
        self._scratch = scratch

    @abstractmethod
    def roots(self) -> list[int]:
        """Processes from which all others of the cluster descend."""

    @abstractmethod
    def check(self) -> None:
        """Raises ClusterError where waiting is in vain."""

    @abstractmethod
    def start_node(self, name: str, *options: str) -> int:
        """Start one more agent, as an operator would on one more machine; returns its pid."""

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on behalf of this cluster."""
        return [process for pid in self.roots() for process in _descendants(pid)]

    # ---- the operator's verbs

    def timeline(self, job_id: str, path: Path, steps: int) -> list[Record]:
        """The events of a timeline of that many steps to come, written to `path`."""
        arguments = ("--timeline", str(path), "--job", job_id, "--steps", str(steps))
        self.oobleck("profile", *arguments, timeout_s=600)
        events: list[Record] = json.loads(path.read_text())["traceEvents"]
        return events

    def oobleck(
        self, *arguments: str, check: bool = True, timeout_s: float = 180
    ) -> subprocess.CompletedProcess[str]:
        """Run `oobleck VERB ...` against this cluster."""
        shown = {"OOBLECK_CREDENTIALS": str(self.credentials)} if self.credentials else {}
        done = subprocess.run(
            [str(BIN / "oobleck"), *arguments],
            env={**os.environ, "OOBLECK_MASTER": self.address, **shown},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            raise ClusterError(f"oobleck {' '.join(arguments)}: {done.stderr.strip()}")
        return done

    def submit(self, job: Mapping[str, object]) -> str:
        """Submit the job file that `job` describes; returns the job's id."""
        path = self._scratch / f"{job['name']}.yaml"
        path.write_text(json.dumps(job))  # JSON is YAML
        return self.oobleck("submit", str(path)).stdout.strip()

    def save(self, job_id: str) -> int:
        """Have a checkpoint taken, without waiting for it; the number of the wish."""
        try:
            with Master(self.endpoint) as master:
                return master.save_checkpoint(job_id)
        except CommandFailed as failed:
            raise ClusterError(str(failed)) from failed

    def status(self, job_id: str) -> Record:
        return self._read(lambda master: text.plain(master.job(job_id)))

    def jobs(self) -> list[Record]:
        return self._read(lambda master: [text.plain(job) for job in master.jobs()])

    def nodes(self) -> dict[str, Record]:
        return self._read(lambda master: {node.node: text.plain(node) for node in master.nodes()})

    def live(self) -> set[str]:
        """Names of the nodes that the master takes for live."""
        return {name for name, node in self.nodes().items() if node["state"] == "live"}

    def planned(self, job_id: str) -> set[str]:
        """The nodes of the plan that the job trains by; none while it does not."""
        status = self.status(job_id)
        if status["state"] != "running":
            return set()
        return {node for pipeline in status["plan"]["pipelines"] for node in pipeline["nodes"]}

    @property
    def endpoint(self) -> Endpoint:
        return choose_endpoint(self.address, self.credentials, insecure=self.credentials is None)

    def _read(self, question: Callable[[Master], T]) -> T:
        """The answer; asked again where a stalled machine has broken the connection."""
        failed: CommandFailed | None = None
        for _ in range(_TRIES):
            try:
                with Master(self.endpoint) as master:
                    return question(master)
            except CommandFailed as again:
                failed = again
                if not (isinstance(again, Unreachable) and again.reached):
                    break
        raise ClusterError(str(failed)) from failed

    # ---- what the files say

    def metrics(self, job_id: str) -> list[Record]:
        return read_lines(self.state_dir / "jobs" / job_id / "metrics.jsonl")

    def last_step(self, job_id: str) -> int:
        """Newest step in the job's metrics; 0: none so far."""
        line = last_line(self.state_dir / "jobs" / job_id / "metrics.jsonl")
        return 0 if line is None else int(line["step"])

    def events(self, job_id: str, kind: str | None = None) -> list[Record]:
        events = read_lines(self.state_dir / "jobs" / job_id / "events.jsonl")
        return [event for event in events if kind in (None, event["event"])]

    # ---- waiting

    def wait(
        self,
        condition: Callable[[], bool],
        what: str,
        timeout_s: float = 240,
        *,
        poll_s: float = 0.02,
    ) -> None:
        """`poll_s`: longer for a condition that costs the cluster something."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"timed out waiting for {what}\n{self.report()}")
            try:
                self.check()
            except ClusterError as error:
                raise ClusterError(f"{error}, waiting for {what}\n{self.report()}") from error
            time.sleep(poll_s)

    def wait_step(self, job_id: str, step: int, timeout_s: float = 240) -> None:
        def reached() -> bool:
            end = self.end_of(job_id)
            if self.last_step(job_id) >= step:
                return True
            if end is not None:
                raise ClusterError(f"job {job_id} ended early: {end}\n{self.tail()}")
            return False

        self.wait(reached, f"step {step} of {job_id}", timeout_s)

    def end_of(self, job_id: str) -> Record | None:
        """The event that ended the job, if it has ended."""
        ends = [e for e in self.events(job_id) if e["event"] in ENDED]
        return ends[-1] if ends else None

    def wait_end(self, job_id: str, timeout_s: float = 180) -> str:
        """Wait until the job has ended; returns how."""
        self.wait(lambda: self.end_of(job_id) is not None, f"the end of {job_id}", timeout_s)
        end = self.end_of(job_id)
        assert end is not None, "just seen"
        return str(end["event"])

    # ---- trouble

    def kill_node(self, name: str) -> list[int]:
        """SIGKILL the agent of a node together with everything it started."""
        return kill_trees(self.agents.pop(name))

    def kill_nodes(self, *names: str) -> list[int]:
        """The same of several, at one moment."""
        return kill_trees(*(self.agents.pop(name) for name in names))

    def worker_pids(self) -> dict[str, int]:
        """Process of every worker, by "node/slot"."""
        return {
            f"{name}/{worker['slot']}": worker["pid"]
            for name, node in self.nodes().items()
            for worker in node["workers"]
        }

    def kill_worker(self, name: str, slot: int = 0) -> int:
        pid = self.worker_pids()[f"{name}/{slot}"]
        os.kill(pid, signal.SIGKILL)
        return pid

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stop the workers of a node, and with them all that wait for theirs, for a while."""
        agent = psutil.Process(self.agents[name])
        workers = [w for warm in agent.children() for w in warm.children()]
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
        """All that tells why the newest job does not get on: its events, the daemons' logs, and
        the workers' with the stacks of their threads."""
        for process in self._workers():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)
        files = [(self.log, 40), *((path, 40) for path in sorted(self.state_dir.glob("log/*.log")))]
        jobs = sorted((self.state_dir / "jobs").glob("*"), key=lambda path: path.stat().st_mtime)
        for job in jobs[-1:]:
            files += [(job / "events.jsonl", 15), (job / "metrics.jsonl", 1)]
            files += [(path, 80) for path in sorted((job / "logs").glob("*.log"))]
        return "\n".join(f"---- {path}\n{_tail(path, lines)}" for path, lines in files)

    def _workers(self) -> list[psutil.Process]:
        """The processes that were forked from an agent's warm process."""
        parents = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                parents[process.pid] = (process, process.ppid(), process.cmdline())
        warm = {pid for pid, (_, _, line) in parents.items() if "oobleck.worker.warm" in line}
        return [process for process, parent, _ in parents.values() if parent in warm]


class LocalCluster(Cluster):
    """`oobleck local` and what may be done to it; a context manager that leaves nothing."""

    def __init__(
        self,
        nodes: int,
        *,
        state_dir: Path | None = None,
        workers_per_node: int = 1,
        fault_plan: Sequence[Mapping[str, object]] = (),
        options: Sequence[str] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="oobleck-")
        scratch = Path(self._folder.name)
        super().__init__(state_dir or scratch / "state", scratch)
        self._extra: list[subprocess.Popen[str]] = []
        command = [str(BIN / "oobleck"), "local", "--nodes", str(nodes)]
        command += ["--workers-per-node", str(workers_per_node)]
        command += ["--listen", "127.0.0.1:0", "--state-dir", str(self.state_dir)]
        self._faults: list[str] = []
        if fault_plan:
            path = scratch / "faults.json"
            path.write_text(json.dumps(list(fault_plan)))
            self._faults = ["--fault-plan", str(path)]
        # Tests fail nodes on purpose, and sooner than any that is to be put aside.
        command += ["--master-flag=--quarantine-s=0", *self._faults, *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
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
                    return
                case _:
                    pass
        raise ClusterError(f"oobleck local ended early:\n{self.log.read_text()}")

    def stop(self) -> None:
        """Ctrl-C, then whatever is left by force."""
        left = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        for extra in self._extra:
            if extra.poll() is None:
                extra.send_signal(signal.SIGINT)
        for running in [self.process, *self._extra]:
            try:
                running.wait(timeout=10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._folder.cleanup()

    def roots(self) -> list[int]:
        return [self.process.pid, *(extra.pid for extra in self._extra)]

    def check(self) -> None:
        if self.process.poll() is not None:
            raise ClusterError("oobleck local ended")

    def start_node(self, name: str, *options: str) -> int:
        """It knows the fault plan too."""
        command = [str(BIN / "oobleck-agent"), "--master", self.address, "--name", name]
        command += [*self._faults, *options]
        with self.log.open("a") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, text=True)
        self._extra.append(agent)
        self.agents[name] = agent.pid
        return agent.pid


def _tail(path: Path, lines: int) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def _descendants(pid: int) -> Iterator[psutil.Process]:
    try:
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)
    except psutil.NoSuchProcess:
        return

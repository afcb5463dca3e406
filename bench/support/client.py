"""An operator's view of a cluster, by the `oobleck` command and by files.

Knows no process, and nothing inside daemons. It reads files of the state directory, and calls the
master directly where the command would only print the answer: starting the command takes a third of
a second of a core each time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bench.support.preloaded import Preloaded
from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.output import text
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint

BIN = Path(sys.executable).parent
Record = dict[str, Any]
T = TypeVar("T")
#: Most bytes of a line: several times as many as lines of metrics have.
_LONGEST_LINE = 4096
#: Attempts of a call that only reads.
_TRIES = 3
#: Final states of a job.
ENDED = ("succeeded", "failed", "cancelled")


class ClusterError(RuntimeError):
    """Error of a cluster that did not do in time what was asked."""


def read_lines(path: Path) -> list[Record]:
    """Return the complete lines of a .jsonl file that may be growing; [] if it does not exist
    yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def last_line(path: Path) -> Record | None:
    """Return the last complete line of a .jsonl file that may be growing."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
            whole, _, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return None
    line = whole.rpartition(b"\n")[2]
    return json.loads(line) if line else None


class Client:
    """Operator of one cluster."""

    def __init__(self, state_dir: Path, scratch: Path) -> None:
        """`scratch`: a folder for job files."""
        self.state_dir = state_dir
        self.address = ""
        #: Credentials; None: they are found, or the cluster requires none.
        self.credentials: Path | None = None
        #: Prefix of PYTHONPATH for processes.
        self.python_path = ""
        #: Process that commands are forked from; None: each command loads its libraries.
        self.preloaded: Preloaded | None = None
        self._scratch = scratch
        self._endpoint: Endpoint | None = None
        #: Open connection, reused for all calls, and its endpoint.
        self._connection: tuple[Endpoint, MasterClient] | None = None

    # ---- the operator's verbs

    def timeline(self, job_id: str, path: Path, steps: int) -> list[Record]:
        """Record a timeline of the next steps to `path`; return its events."""
        arguments = ("--timeline", str(path), "--job", job_id, "--steps", str(steps))
        self.oobleck("profile", *arguments, timeout_s=600)
        events: list[Record] = json.loads(path.read_text())["traceEvents"]
        return events

    def oobleck(
        self, *arguments: str, check: bool = True, timeout_s: float = 400
    ) -> subprocess.CompletedProcess[str]:
        """Run `oobleck VERB ...` against this cluster."""
        shown = {"OOBLECK_CREDENTIALS": str(self.credentials)} if self.credentials else {}
        environment = {**self.child_environment(), "OOBLECK_MASTER": self.address, **shown}
        if self.preloaded is not None:
            done = self.preloaded.run(
                "oobleck.cli.main", *arguments, environment=environment, timeout_s=timeout_s
            )
        else:
            done = subprocess.run(
                [str(BIN / "oobleck"), *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        if check and done.returncode != 0:
            raise ClusterError(f"oobleck {' '.join(arguments)}: {done.stderr.strip()}")
        return done

    def child_environment(self) -> dict[str, str]:
        """Return the environment of the cluster's processes and of commands."""
        path = filter(None, (self.python_path, os.environ.get("PYTHONPATH")))
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    def submit(self, job: Mapping[str, object]) -> str:
        """Submit the job that `job` describes; return its id."""
        path = self._scratch / f"{job['name']}.yaml"
        path.write_text(json.dumps(job))  # JSON is YAML
        return self.oobleck("submit", str(path)).stdout.strip()

    def save(self, job_id: str) -> int:
        """Request a checkpoint without waiting for it; return the number of the request."""
        try:
            with MasterClient(self.endpoint) as master:
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
        """Return the names of the nodes that are live according to the master."""
        return {name for name, node in self.nodes().items() if node["state"] == "live"}

    def planned(self, job_id: str) -> set[str]:
        """Return the nodes of the job's plan; none while it does not train."""
        status = self.status(job_id)
        if status["state"] != "running":
            return set()
        return {node for pipeline in status["plan"]["pipelines"] for node in pipeline["nodes"]}

    @property
    def endpoint(self) -> Endpoint:
        known = self._endpoint
        if known is None or known.credentials is None or known.address != self.address:
            known = self._endpoint = choose_endpoint(self.address, self.credentials, insecure=False)
        return known

    def _read(self, question: Callable[[MasterClient], T]) -> T:
        """Return the answer; ask again if a stalled machine has broken the connection.

        The connection is kept: making one costs both ends three times as much as an answer, and
        callers that wait ask often.
        """
        failed: CommandFailed | None = None
        for _ in range(_TRIES):
            try:
                return question(self._connected())
            except CommandFailed as again:
                self.hang_up()
                failed = again
                if not (isinstance(again, Unreachable) and again.reached):
                    break
        raise ClusterError(str(failed)) from failed

    def _connected(self) -> MasterClient:
        endpoint = self.endpoint
        if self._connection is None or self._connection[0] != endpoint:
            self.hang_up()
            self._connection = (endpoint, MasterClient(endpoint))
        return self._connection[1]

    def hang_up(self) -> None:
        """Close the connection to the master, if there is one."""
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    # ---- what the files say

    def metrics(self, job_id: str) -> list[Record]:
        return read_lines(self.state_dir / "jobs" / job_id / "metrics.jsonl")

    def last_step(self, job_id: str) -> int:
        """Return the newest step in the job's metrics; 0: none so far."""
        line = last_line(self.state_dir / "jobs" / job_id / "metrics.jsonl")
        return 0 if line is None else int(line["step"])

    def events(self, job_id: str, kind: str | None = None) -> list[Record]:
        events = read_lines(self.state_dir / "jobs" / job_id / "events.jsonl")
        return [event for event in events if kind in (None, event["event"])]

    def end_of(self, job_id: str) -> Record | None:
        """Return the event that ended the job, if it has ended."""
        ends = [e for e in self.events(job_id) if e["event"] in ENDED]
        return ends[-1] if ends else None

"""A whole cluster on this machine for notebooks and tests: `oobleck local` in the background.

`oobleck local` is a separate process, which starts the daemons, watches them and restarts agents.
If this process ends in any way, so do that one and all that it started. Must not know the daemons'
work.
"""

import atexit
import contextlib
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil

from oobleck.cli.chaos.injector import kill, victims
from oobleck.client import Client
from oobleck.errors import NotFound, error_of
from oobleck.host.ipc.endpoint import choose_endpoint
from oobleck.host.security.credentials import OPERATOR
from oobleck.host.system.process import with_parent

#: Longest wait for the end; `oobleck local` ends its daemons in half of it.
_STOP_S = 10.0
_MASTER = re.compile(r"master (\S+) pid \d+")
_AGENT = re.compile(r"agent (\S+) pid (\d+)")
_ENDED = re.compile(r"agent (\S+) \(pid (\d+)\) .*")


@contextmanager
def local(
    nodes: int = 5, workers_per_node: int = 1, state_dir: str | Path | None = None
) -> Iterator["LocalCluster"]:
    """Run a master and `nodes` agents, named n1 and so on. Raises Error.

    `state_dir`: journal, metrics and logs, kept for the next start; without it they are in a folder
    that is removed with the cluster. The cluster also ends with the thread that started it.
    """
    with ExitStack() as stack:
        if state_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="oobleck-", ignore_cleanup_errors=True)
            state_dir = stack.enter_context(folder)
        errors = stack.enter_context(tempfile.TemporaryFile())
        cluster = LocalCluster(nodes, workers_per_node, Path(state_dir), errors)
        stack.callback(cluster._stop)
        # A notebook may never leave the block, and at exit the reader ends before Python does.
        atexit.register(stack.close)
        stack.callback(atexit.unregister, stack.close)
        cluster._await_ready()
        stack.enter_context(cluster.client)
        yield cluster


class LocalCluster:
    """Running cluster, made by `local`."""

    #: Operator of the cluster.
    client: Client

    def __init__(self, nodes: int, workers: int, state_dir: Path, errors: IO[bytes]) -> None:
        """Start the cluster. `errors`: file for the standard error of `oobleck local`."""
        #: Address of the master, for other operators and for the command.
        self.master = ""
        self.state_dir = state_dir
        self._errors = errors
        self._agents: dict[str, int] = {}
        self._told = threading.Event()
        arguments = ["--nodes", str(nodes), "--workers-per-node", str(workers)]
        arguments += ["--listen", "127.0.0.1:0", "--state-dir", str(state_dir)]
        self._process = subprocess.Popen(
            [*with_parent("oobleck.cli.main"), "local", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Ctrl-C is for this process, which then ends that one.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def nodes(self) -> dict[str, int]:
        """Running agents' process ids, by name."""
        return dict(self._agents)

    def kill(self, node: str) -> None:
        """Send SIGKILL to the node's agent and all its workers, as if its machine had died. The
        agent is restarted after two seconds. Raises NotFound."""
        pid = self._agents.pop(node, None)
        if pid is None:
            running = ", ".join(sorted(self._agents)) or "none"
            raise NotFound(f"no node {node!r} runs here; running: {running}")
        kill(victims("kill-node", pid))

    def _read(self) -> None:
        """Read the output of `oobleck local` to its end: the master's address, and each agent's
        pid."""
        assert self._process.stdout is not None, "opened as a pipe"
        for line in self._process.stdout:
            if found := _MASTER.match(line):
                self.master = found[1]
            elif found := _AGENT.match(line):
                self._agents[found[1]] = int(found[2])
            elif (found := _ENDED.match(line)) and self._agents.get(found[1]) == int(found[2]):
                del self._agents[found[1]]
            elif line == "ready\n":
                self._told.set()
        self._told.set()

    def _await_ready(self) -> None:
        self._told.wait()
        if not self._reader.is_alive():
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix("oobleck: ") if lines else f"it ended with code {code}"
            raise error_of(f"no local cluster: {why}", code)
        operator = self.state_dir / "pki" / OPERATOR
        self.client = Client(choose_endpoint(self.master, operator, insecure=False))

    def _stop(self) -> None:
        """Send SIGINT, as Ctrl-C does to end `oobleck local`, then kill remaining processes."""
        left = []
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(self._process.pid).children(recursive=True)
        try:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        finally:
            self._process.kill()
            self._process.wait()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, _STOP_S)
            self._reader.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

"""Processes for drills to strike."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil

from oobleck.proto import control_pb2 as pb
from support.waiting import until

_CHILD = "import time; time.sleep(600)"
_AGENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_CHILD!r}])"


@contextlib.contextmanager
def agent_with_worker(on: Sequence[str] = ()) -> Iterator[pb.NodeInfo]:
    """Run processes that pass for an agent and its worker. `on`: the beginning of a command that
    runs on another host."""
    command = [*on, sys.executable, "-c", _AGENT, "oobleck-agent"]
    with subprocess.Popen(command) as process:
        agent = psutil.Process(process.pid)
        try:
            until(agent.children, "the process below it")
            (worker,) = agent.children()
            yield pb.NodeInfo(
                node="n1",
                state="live",
                hostname=socket.gethostname(),
                pid=agent.pid,
                workers=[pb.WorkerStatus(slot=0, pid=worker.pid)],
            )
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (*agent.children(recursive=True), agent):
                    one.kill()

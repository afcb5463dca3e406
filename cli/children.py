"""The daemons that `oobleck local` runs: started, watched and stopped as subprocesses.

They die with this process, however it ends. Must not know gRPC: the children are started before
it is loaded, since forking beside its threads is not safe.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from oobleck.host.process import die_with_parent, signal_name

#: Agents give their workers 2 s; the master goes after them.
AGENT_GRACE_S = 3.3
MASTER_GRACE_S = 1.0
_TAIL_BYTES = 4096


class Child:
    """One daemon; its output goes to a file."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path, *, piped: bool = False
    ) -> None:
        """`piped`: its standard output can be read from `process.stdout`."""
        self.name = name
        self.arguments = tuple(arguments)
        self.log = log
        #: Its end has been told.
        self.told = False
        self.command = [sys.executable, "-m", module, *arguments, "--exit-with-parent"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                start_new_session=True,
                # The flag takes effect only once Python runs; this from the first moment on.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL` or `ended with exit code 2: its last line`."""
        code = self.process.returncode
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        last = self.last_line()
        return f"ended with exit code {code}" + (f": {last}" if last else "")

    def last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def stop(master: Child | None, agents: Sequence[Child]) -> None:
    """End all of them within five seconds; called again it kills at once."""
    everyone = [*agents, *([master] if master else [])]
    try:
        _end(agents, AGENT_GRACE_S)
        _end([master] if master else [], MASTER_GRACE_S)
    finally:
        for child in everyone:
            if child.alive:
                child.process.kill()
        for child in everyone:
            child.process.wait()


def _end(children: Sequence[Child], grace_s: float) -> None:
    for child in children:
        if child.alive:
            child.process.send_signal(signal.SIGINT)  # SIGTERM would drain an agent's node
    deadline = time.monotonic() + grace_s
    while any(child.alive for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)

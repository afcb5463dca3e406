"""Daemons that `oobleck local` runs as subprocesses: their start, restart and stop.

They die with this process, however it ends. The module that starts them ensures that, because code
between fork and exec is unsafe beside gRPC's threads. Must not know gRPC.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from oobleck.cli.options import USAGE
from oobleck.host.system.process import signal_name, with_parent

#: Agents give their workers 2 s; the master is stopped after them.
AGENT_GRACE_S = 3.3
MASTER_GRACE_S = 1.0
#: Pause before a daemon that died is restarted. If it lives for less than QUICK_S each time, the
#: pause doubles, up to the longest.
RESTART_S = 2.0
QUICK_S = 10.0
LONGEST_RESTART_S = 30.0
_TAIL_BYTES = 4096


def restart_pause_s(quick_ends: int) -> float:
    """Return the pause before a restart, after `quick_ends` consecutive early ends."""
    return float(min(LONGEST_RESTART_S, RESTART_S * 2 ** min(10, max(0, quick_ends - 1))))


class Child:
    """Daemon whose output goes to a file."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path, *, piped: bool = False
    ) -> None:
        """Start the daemon. `piped`: its standard output can be read from `process.stdout`."""
        self.name = name
        self.arguments = tuple(arguments)
        self.log = log
        #: Whether its end has been reported.
        self.told = False
        #: Time of its restart; None: none is planned.
        self.due: float | None = None
        self._module, self._piped = module, piped
        self._quick_ends = 0
        self.start()

    def start(self) -> None:
        """Start the daemon, or restart it after it has ended."""
        self.told, self.due, self._started_at = False, None, time.monotonic()
        with open(self.log, "ab", opener=_for_its_owner) as output:
            self.process = subprocess.Popen(
                [*with_parent(self._module), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._piped else output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def has_died(self) -> bool:
        """True if it failed: it ended neither by a requested stop nor by refusing its arguments."""
        return self.process.returncode not in (None, 0, USAGE)

    def plan_restart(self) -> float:
        """Plan a restart; return the pause in seconds."""
        now = time.monotonic()
        self._quick_ends = self._quick_ends + 1 if now - self._started_at < QUICK_S else 0
        pause_s = restart_pause_s(self._quick_ends)
        self.due = now + pause_s
        return pause_s

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def how_it_ended(self) -> str:
        """Return `was killed by SIGKILL` or `ended with exit code 2: its last line`."""
        code = self.process.returncode
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        last = self.last_line()
        return f"ended with exit code {code}" + (f": {last}" if last else "")

    def last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def stop(master: Child | None, agents: Sequence[Child]) -> None:
    """End all of them within five seconds; a second call kills at once."""
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

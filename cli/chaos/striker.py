"""Faults of a drill on this machine's processes, and their undoing.

It sends signals to processes, as far as the user may, and bytes without meaning to an open port.
It does not know when to strike, nor what becomes of the job.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading

from oobleck.cli.chaos.victims import kill, master_pid, send, victims
from oobleck.proto import control_pb2 as pb

#: More than any greeting, and what claims to be far longer than it is.
_GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(1 << 16),
    b"\xff\xff\xff\xff" + bytes(1 << 17),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(1 << 16),
)
_STRANGER_S = 2.0


class Striker:
    """Strikes, and has what it stopped go on after a while, whatever else goes on."""

    def __init__(
        self,
        address: str,
        *,
        stop_for_s: float,
        restart_agent: str | None,
        restart_master: str | None,
    ) -> None:
        """`address`: the master's; the two commands start again what was killed."""
        self._address = address
        self.stop_for_s = stop_for_s
        self._restart_agent = restart_agent
        self._restart_master = restart_master
        self._lock = threading.Lock()
        #: Stopped processes, and what has them go on. Not the drill's own thread: where the master
        #: is stopped, that one waits for its answer.
        self._stopped: dict[int, threading.Timer] = {}

    @property
    def has_stopped(self) -> bool:
        """True while anything is stopped."""
        with self._lock:
            return bool(self._stopped)

    def strike(self, kind: str, node: pb.NodeInfo | None) -> str | None:
        """Strike, and return for the operator what was struck. Return None if there is nothing to
        strike at the moment.

        Raises CommandFailed where the process belongs to somebody else.
        """
        if kind == "garbage":
            return f"at {self._address}" if _disturb(self._address) else None
        if kind.endswith("-master"):
            pid = master_pid(self._address)
            pids = [] if pid is None else [pid]
        else:
            pids = [] if node is None or node.state != "live" else victims(kind, node)
        struck = kill(pids) if kind.startswith("kill") else self._stop(pids)
        if not struck:
            return None
        numbers = f"(pid {', '.join(map(str, struck))})"
        return numbers if kind.endswith("-master") or node is None else f"{node.node} {numbers}"

    def _stop(self, pids: list[int]) -> list[int]:
        struck = []
        for pid in pids:
            timer = threading.Timer(self.stop_for_s, self._go_on, (pid,))
            timer.daemon = True
            with self._lock:
                self._stopped[pid] = timer
            if send(pid, signal.SIGSTOP):
                struck.append(pid)
                timer.start()
            else:
                self._go_on(pid)
        return struck

    def _go_on(self, pid: int) -> None:
        with self._lock:
            if self._stopped.pop(pid, None) is not None:
                send(pid, signal.SIGCONT)

    def undo(self) -> None:
        """Let all that is stopped go on now."""
        with self._lock:
            stopped = dict(self._stopped)
        for pid, timer in stopped.items():
            timer.cancel()
            self._go_on(pid)

    def restart(self, kind: str, node: str) -> str | None:
        """The command that starts again what was killed, and is started; None: it needs none."""
        match kind:
            case "kill-agent" | "kill-node":
                assert self._restart_agent is not None, "asked for with the kind"
                command = self._restart_agent.replace("{node}", shlex.quote(node))
            case "kill-master":
                assert self._restart_master is not None, "asked for with the kind"
                command = self._restart_master
            case _:
                return None
        started = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=started.wait, daemon=True).start()
        return command


def _disturb(address: str) -> bool:
    """Say at a port what nobody there understands; whether anybody was let in."""
    host, _, port = address.rpartition(":")
    let_in = False
    for message in _GARBAGE:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host.strip("[]"), int(port)), _STRANGER_S) as stranger,
        ):
            let_in = True
            stranger.settimeout(_STRANGER_S)
            stranger.sendall(message)
    return let_in

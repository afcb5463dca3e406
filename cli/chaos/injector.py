"""Injection of faults into the processes and the network of the machine that it runs on.

Drills of `oobleck chaos` on this machine, benchmarks and tests call it. `--ssh` sends its text to a
host, where Python runs it, so it needs nothing but Python's own library. Stopped processes and cut
networks come back by themselves: a process of its own waits for that, whatever becomes of the
drill.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

#: Program of the healer. It cuts the network if it gets address families, once the answer is on its
#: way. It waits until its time is over, or until SIGTERM. Then it continues the stopped processes
#: that are still the same, and plugs the network in.
_HEALER = """
import os, signal, subprocess, sys, time
def rule(verb):
    # Before all rules but that of the host's own addresses, so that the loopback goes on.
    for family in sys.argv[2].split():
        command = ["ip", family, "rule", verb, "pref", "1", "blackhole"]
        subprocess.run(command, stderr=subprocess.DEVNULL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
os.close(1)
if sys.argv[2]:
    time.sleep(0.5)
    rule("add")
signal.sigtimedwait([signal.SIGTERM], float(sys.argv[1]))
rule("del")
for word in sys.argv[3:]:
    pid, began = word.split(":")
    try:
        with open(f"/proc/{pid}/stat") as file:
            same = file.read().rpartition(")")[2].split()[19] == began
        if same:
            os.kill(int(pid), signal.SIGCONT)
    except OSError:
        pass
"""


#: Garbage: more bytes than any greeting has, and messages whose headers claim far too much length.
_GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    os.urandom(1 << 16),
    b"\xff\xff\xff\xff" + bytes(1 << 17),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(1 << 16),
)
_STRANGER_S = 2.0


class Refused(Exception):
    """Refusal of a strike; the text is for the operator."""


def main(request: dict[str, Any]) -> None:
    request.pop("directory")
    reply: dict[str, Any]
    try:
        reply = {"reply": act(**request)}
    except Refused as refused:
        reply = {"refused": str(refused)}
    except OSError as error:
        reply = {"refused": error.strerror or str(error)}
    print(json.dumps(reply))


def act(action: str, **arguments: Any) -> dict[str, Any]:
    """Do one of the actions below. Raises Refused."""
    actions: dict[str, Callable[..., dict[str, Any]]]
    actions = {"look": look, "strike": strike, "heal": heal}
    return actions[action](**arguments)


def look(agent: int, kinds: list[str]) -> dict[str, Any]:
    """Check that all `kinds` of faults can be done to the agent's node. Raises Refused."""
    _check_agent(agent)
    try:
        os.kill(agent, 0)
    except PermissionError:
        raise Refused(f"its agent (pid {agent}) is another user's; log in as that one") from None
    if "unplug" in kinds and os.geteuid() != 0:
        raise Refused("unplug: the network is cut by root; log in as root, or leave the kind out")
    if "unplug" in kinds:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", "rule"], capture_output=True, check=False)
            return {}
        raise Refused("unplug: there is no program 'ip'; install iproute2, or leave the kind out")
    return {}


def strike(kind: str, agent: int, workers: list[int], for_s: float) -> dict[str, Any]:
    """Strike the agent's node. Return the struck processes, and the process that undoes the fault
    (0: none). Raises Refused."""
    if not any(_words(agent)):
        return {"struck": [], "healer": 0}
    _check_agent(agent)
    if kind == "unplug":
        return {"struck": [agent], "healer": _start_healer(for_s, [], "-4 -6")}
    pids = victims(kind, agent, workers)
    if kind.startswith("kill"):
        return {"struck": kill(pids), "healer": 0}
    struck, healer = stop(pids, for_s)
    return {"struck": struck, "healer": healer}


def kill(pids: Sequence[int]) -> list[int]:
    """Send SIGKILL to all of them, and return those that existed. Raises Refused."""
    # Stop all of them first, so that none can report the end of another.
    for pid in pids if len(pids) > 1 else ():
        _send(pid, signal.SIGSTOP)
    return [pid for pid in pids if _send(pid, signal.SIGKILL)]


def stop(pids: Sequence[int], for_s: float) -> tuple[list[int], int]:
    """Send SIGSTOP to all of them. Return those that existed, and the process that continues them
    after `for_s` (0: none). Raises Refused."""
    healer = _start_healer(for_s, pids, "") if pids else 0
    return [pid for pid in pids if _send(pid, signal.SIGSTOP)], healer


def garbage(address: str, port: int, connect_s: float = _STRANGER_S) -> bool:
    """Send garbage to a port; return whether it accepted the connection."""
    let_in = False
    for message in _GARBAGE:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), connect_s) as stranger,
        ):
            let_in = True
            stranger.settimeout(_STRANGER_S)
            stranger.sendall(message)
    return let_in


def heal(healer: int) -> dict[str, Any]:
    """Make the healer undo its fault at once; return whether it was still there."""
    words = _words(healer)
    return {"healed": any("sigtimedwait" in word for word in words) and _send(healer, 15)}


def victims(kind: str, agent: int, workers: Sequence[int] = ()) -> list[int]:
    """Return the pids that `kind` strikes, in the order of the strikes, the agent last."""
    below = _below(agent)
    if kind.endswith("-agent"):
        return [agent]
    if kind.endswith("-node"):
        return [*reversed(below), agent]
    mine = [pid for pid in workers if pid in below][:1]
    if kind == "kill-warm":
        return [_parents()[pid] for pid in mine]
    return mine


def _start_healer(for_s: float, pids: Sequence[int], families: str) -> int:
    """Start the process that undoes the fault; return its pid once it takes signals."""
    words = [f"{pid}:{began}" for pid in pids if (began := _began(pid))]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _HEALER, str(for_s), families, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    threading.Thread(target=process.wait, daemon=True).start()
    return process.pid


def _check_agent(pid: int) -> None:
    if not any("oobleck" in word and "agent" in word for word in _words(pid)):
        raise Refused(f"pid {pid} there is no agent; does the line name the node's host?")


def _words(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def _below(pid: int) -> list[int]:
    """Return all descendants of a process, the nearer ones first."""
    parents, found, more = _parents(), [], [pid]
    while more:
        more = [one for one, parent in parents.items() if parent in more]
        found += more
    return found


def _began(pid: int) -> str:
    """Return the start time of a process in ticks since the boot; empty: there is no such
    process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _send(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise Refused(f"pid {pid} is another user's; drill as the user of the agents") from None
    return True

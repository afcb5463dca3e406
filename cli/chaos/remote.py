"""Script of `oobleck chaos --ssh` on a host. Its text is sent over ssh and run by the Python there.

It needs nothing but Python's own library, therefore. Processes that are stopped and networks that
are cut off come back by themselves: a process of its own waits for that, whatever becomes of the
connection and of the drill.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Cuts the network if it is told families of addresses, once the answer is on its way. Waits, or
#: until SIGTERM; then has what was stopped go on, if it is what it was, and plugs in.
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


class Refused(Exception):
    """The text is for the operator."""


def main(request: dict[str, Any]) -> None:
    actions: dict[str, Callable[..., dict[str, Any]]]
    actions = {"look": look, "strike": strike, "heal": heal}
    action = actions[request.pop("action")]
    request.pop("directory")
    reply: dict[str, Any]
    try:
        reply = {"reply": action(**request)}
    except Refused as refused:
        reply = {"refused": str(refused)}
    except OSError as error:
        reply = {"refused": error.strerror or str(error)}
    print(json.dumps(reply))


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
    """The processes that were struck, and the one (0: none) that has them go on."""
    _check_agent(agent)
    if kind == "unplug":
        return {"struck": [agent], "healer": _start_healer(for_s, [], "-4 -6")}
    pids = _victims(kind, agent, workers)
    if kind.startswith("stop"):
        healer = _start_healer(for_s, pids, "") if pids else 0
        return {"struck": [pid for pid in pids if _send(pid, signal.SIGSTOP)], "healer": healer}
    # Of several all stop first, so that none gets to see and tell the end of another.
    for pid in pids if len(pids) > 1 else ():
        _send(pid, signal.SIGSTOP)
    return {"struck": [pid for pid in pids if _send(pid, signal.SIGKILL)], "healer": 0}


def heal(healer: int) -> dict[str, Any]:
    """Make the healer undo its fault at once; return whether it was still there."""
    words = _words(healer)
    return {"healed": any("sigtimedwait" in word for word in words) and _send(healer, 15)}


def _victims(kind: str, agent: int, workers: list[int]) -> list[int]:
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


def _start_healer(for_s: float, pids: list[int], families: str) -> int:
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
    """Ticks since the boot; empty: there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _send(pid: int, signum: int) -> bool:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True

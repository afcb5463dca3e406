"""What `oobleck up` and `down` do on a host. Its text is sent over ssh and run by the Python there.

So it needs nothing but Python's own library: Oobleck is not there yet. `main` reads one request and
prints one reply, as JSON. All that it makes is in one folder, but for a unit of systemd:

    wheels/DIGEST/NAME.whl   what was copied there
    venvs/KEY/               the programs; the file `whole` says that all of it is there
    credentials/             the node's certificate
    agent.json, agent.log    the agent as it was started last, and what it says
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: The agent's own grace for a drain, and its end.
DRAIN_S = 135.0
_END_S = 5.0
_UNIT = "oobleck-up.service"
_TAIL_BYTES = 4096
_PARTS = ("wheels", "venvs", "credentials", "agent.json", "agent.log", "lock")


class Refused(Exception):
    """The text is for the operator: what is wrong, and the fix."""


def main(request: dict[str, Any]) -> None:
    os.umask(0o077)
    folder = Path(request.pop("directory")).expanduser().absolute()
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        "look": look,
        "install": install,
        "join": join,
        "start": start,
        "state": state,
        "stop": stop,
    }
    action = actions[request.pop("action")]
    reply: dict[str, Any]
    try:
        reply = {"reply": action(folder, **request)}
    except Refused as refused:
        reply = {"refused": str(refused)}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reply = {"refused": f"{where}{error.strerror}"}
    print(json.dumps(reply))


# ---- looking


def look(folder: Path, key: str) -> dict[str, Any]:
    """What is there. `key`: of the installation that is wanted."""
    if importlib.util.find_spec("ensurepip") is None:
        raise Refused(
            f"{sys.executable} ({platform.python_version()}) cannot make a virtual environment; "
            "install python3-venv there, or name another with --python"
        )
    there = folder
    while not there.exists():
        there = there.parent
    return {
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(there).free,
        "wheels": [f"{path.parent.name}/{path.name}" for path in folder.glob("wheels/*/*.whl")],
        "installed": (folder / "venvs" / key / "whole").exists(),
        "certificate": _text(folder / "credentials" / "client.crt"),
        "authority": _text(folder / "credentials" / "ca.crt"),
        **state(folder),
    }


def state(folder: Path) -> dict[str, Any]:
    """The agent: `pid` (0: none runs), `command` by which it was started, `last` line it said."""
    agent = _recorded(folder)
    return {
        "pid": _pid(agent),
        "command": agent.get("command", []),
        "last": _last_line(folder / "agent.log"),
    }


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


def _last_line(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def _recorded(folder: Path) -> dict[str, Any]:
    """The agent that was started last."""
    text = _text(folder / "agent.json")
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _pid(agent: dict[str, Any]) -> int:
    """0: it does not run."""
    if "unit" in agent:
        shown = _systemctl(agent["unit"], "show", "--property=MainPID", "--value", _UNIT)
        return int(shown.strip() or 0)
    pid = int(agent.get("pid", 0))
    return pid if pid and _began(pid) == agent["began"] else 0


def _began(pid: int) -> str:
    """Of a process: the boot, and the ticks since then, at which it began. Empty: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if fields[0] in "ZX":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + fields[19]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One command at a time changes the folder."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- installing and joining


def install(
    folder: Path, key: str, wheels: list[str], constraint: str, alone: bool
) -> dict[str, Any]:
    """Make venvs/KEY. `wheels`: below wheels/, the first one is Oobleck's. `constraint`: text of a
    constraints file; may be empty. `alone`: these wheels are all that may be installed."""
    target = folder / "venvs" / key
    paths = [folder / "wheels" / wheel for wheel in wheels]
    with _locked(folder):
        if (target / "whole").exists():
            return {}
        shutil.rmtree(target, ignore_errors=True)
        _run("python -m venv", [sys.executable, "-P", "-m", "venv", str(target)])
        pip = [str(target / "bin" / "python"), "-P", "-m", "pip", "install", "--no-input"]
        pip += ["--quiet", "--disable-pip-version-check", *(["--no-index"] if alone else [])]
        for path in paths[1:]:
            pip += ["--find-links", str(path.parent)]
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".txt") as constraints:
            constraints.write(constraint)
            constraints.flush()
            _run("pip", [*pip, "--constraint", constraints.name, str(paths[0])])
        (target / "whole").touch()
        for old in set(folder.glob("wheels/*/*")) - set(paths):
            old.unlink()
    return {}


def join(folder: Path, key: str, master: str, name: str, token: str) -> dict[str, Any]:
    """Get the node's certificate by the token, which no other user of the host sees."""
    command = [str(folder / "venvs" / key / "bin" / "oobleck"), "pki", "join", name]
    command += ["--master", master, "--credentials", str(folder / "credentials")]
    with _locked(folder), tempfile.NamedTemporaryFile("w", dir=folder, suffix=".token") as file:
        file.write(token)
        file.flush()
        _run("joining", [*command, "--token-file", file.name])
    return {}


def _run(what: str, command: list[str]) -> None:
    """Raises Refused with the last line that it says of an error."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OOBLECK_")}
    done = subprocess.run(command, capture_output=True, text=True, env=plain, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["no word"]
        raise Refused(f"{what} ends with exit code {done.returncode}: {errors[-1].strip()}")


# ---- starting and stopping


def start(folder: Path, key: str, options: list[str]) -> dict[str, Any]:
    """Have the agent of venvs/KEY run with these options, and no other one; its pid."""
    command = [str(folder / "venvs" / key / "bin" / "oobleck-agent"), *options]
    command += ["--credentials", str(folder / "credentials")]
    with _locked(folder):
        if state(folder)["pid"] and _recorded(folder)["command"] == command:
            return state(folder)
        _stop(folder, now=False)
        _start(folder, command)
        for old in [path for path in (folder / "venvs").iterdir() if path.name != key]:
            shutil.rmtree(old)
        return state(folder)


def _start(folder: Path, command: list[str]) -> None:
    agent: dict[str, Any] = {"command": command}
    if (scope := _scope()) is not None:
        unit = _unit_folder(scope) / _UNIT
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(_unit(folder, command, scope))
        unit.chmod(0o644)
        agent["unit"] = scope
        _record(folder, agent)
        _systemctl(scope, "daemon-reload")
        _systemctl(scope, "enable", "--quiet", _UNIT)
        _systemctl(scope, "restart", _UNIT)
        return
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _record(folder, {**agent, "pid": process.pid, "began": _began(process.pid)})


def _record(folder: Path, agent: dict[str, Any]) -> None:
    new = folder / "agent.json.new"
    new.write_text(json.dumps(agent))
    new.replace(folder / "agent.json")


def stop(folder: Path, now: bool, purge: bool) -> dict[str, Any]:
    """End the agent, and all below it. `now`: its work does not move off first. `purge`: remove
    all that `up` has made."""
    done = {"stopped": False, "purged": False}
    if not (folder / "lock").exists():
        return done
    with _locked(folder):
        done["stopped"] = _stop(folder, now=now)
        if purge:
            for name in _PARTS:
                path = folder / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else's files stay
                folder.rmdir()
            done["purged"] = True
    return done


def _stop(folder: Path, *, now: bool) -> bool:
    """Whether anything ran."""
    agent = _recorded(folder)
    pid = _pid(agent)
    below = _below(pid) if pid else {}
    if "unit" in agent:
        scope = agent["unit"]
        if pid and now:
            _signal(pid, signal.SIGINT)
        _systemctl(scope, "disable", "--quiet", "--now", _UNIT)
        (_unit_folder(scope) / _UNIT).unlink(missing_ok=True)
        _systemctl(scope, "daemon-reload")
    elif pid:
        if not now:
            _signal(pid, signal.SIGTERM)
            _until_ended({pid: agent["began"]}, DRAIN_S)
        if _began(pid) == agent["began"]:
            _signal(pid, signal.SIGINT)
            _until_ended({pid: agent["began"]}, _END_S)
    # They end with the agent; one that the kernel cannot end at once is waited for.
    left = _until_ended({**below, **({pid: agent["began"]} if "began" in agent else {})}, _END_S)
    for one in left:
        _signal(one, signal.SIGKILL)
    if _until_ended(left, _END_S):
        raise Refused(f"pid {', '.join(map(str, left))} does not end; look at the host")
    (folder / "agent.json").unlink(missing_ok=True)
    return bool(pid)


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _below(pid: int) -> dict[int, str]:
    """All processes that come from it, and when each began."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            parents[int(path.name)] = int(fields[1])
    found: list[int] = []
    more = [pid]
    while more:
        more = [one for one, parent in parents.items() if parent in more]
        found += more
    return {one: began for one in found if (began := _began(one))}


def _until_ended(processes: dict[int, str], most_s: float) -> dict[int, str]:
    """Those that are left."""
    deadline = time.monotonic() + most_s
    while True:
        processes = {pid: began for pid, began in processes.items() if _began(pid) == began}
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.02)


# ---- systemd


def _scope() -> str | None:
    """Which systemd shall keep the agent up: `system`, `user`, or none at all."""
    if os.geteuid() == 0:
        return "system" if Path("/run/systemd/system").is_dir() else None
    # A user's systemd ends with the last login, unless it lingers.
    user = Path("/var/lib/systemd/linger", os.environ.get("USER", "-")).exists()
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    return "user" if user and Path(runtime, "systemd", "private").exists() else None


def _unit_folder(scope: str) -> Path:
    if scope == "system":
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"), "systemd", "user")


def _systemctl(scope: str, *arguments: str) -> str:
    """What it prints. Raises Refused."""
    runtime = {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"} if scope == "user" else {}
    command = ["systemctl", f"--{scope}", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**runtime, **os.environ}, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        raise Refused(f"{' '.join(command)} ends with exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def _unit(folder: Path, command: list[str], scope: str) -> str:
    target = "multi-user.target" if scope == "system" else "default.target"
    return f"""\
# Written by 'oobleck up', which replaces it; 'oobleck down' removes it.
[Unit]
Description=Oobleck agent
Wants=network-online.target
After=network-online.target

[Service]
ExecStart={" ".join(map(_quoted, command))}
WorkingDirectory={str(folder).replace("%", "%%")}
StandardOutput=append:{str(folder / "agent.log").replace("%", "%%")}
StandardError=inherit
UMask=0077
# What the master refuses for good is not tried again.
Restart=always
RestartSec=1
RestartPreventExitStatus=2
# A stop drains the node first. An agent's workers die with it.
KillMode=mixed
TimeoutStopSec={DRAIN_S:.0f}
LimitMEMLOCK=infinity
OOMPolicy=continue

[Install]
WantedBy={target}
"""


def _quoted(word: str) -> str:
    """As a word of ExecStart."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(plain, escaped)
    return f'"{word}"'

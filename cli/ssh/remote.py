"""Script of `oobleck up` and `down` on a host, sent over ssh and run by the Python there.

It needs only Python's own library, because Oobleck is not installed yet. `main` reads one request
and prints one reply, as JSON. All its files are in one folder, except a unit of systemd:

    wheels/DIGEST/NAME.whl   copied wheels
    venvs/KEY/               the programs; the file `whole` marks a complete one
    agent.json, agent.log    the last started agent, and its output
    credentials/             the node's certificate

An agent runs as root only on request. If root logs in, the folder is root's, and `state/` in it
belongs to the agent's user: its certificate, and files of jobs. Jobs run code as that user, so root
follows no link there, and runs and writes nothing there except as that user.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The agent's own grace period for a drain, and that for its end.
DRAIN_S = 135.0
_END_S = 5.0
_UNIT = "oobleck-up.service"
_TAIL_BYTES = 4096
_MOST_TEXT_BYTES = 1 << 20
_PARTS = ("wheels", "venvs", "credentials", "state", "agent.json", "agent.log", "lock")
#: Default folder, for root and for others.
_OF_ROOT = "/opt/oobleck-up"
_OF_OTHERS = "~/.oobleck/up"
#: User that runs agents if root logs in and names none.
_USER = "oobleck"
#: Keys of the unit in deploy/ that `up` replaces.
_REPLACED = frozenset(
    {"User", "Environment", "EnvironmentFile", "ExecStart", "StateDirectory", "StateDirectoryMode"}
)
#: Keys of that unit that a user's own systemd supports: the others need mounts, capabilities or
#: users.
_IN_USERS_UNITS = frozenset(
    {
        *("Restart", "RestartSec", "KillMode", "TimeoutStopSec", "OOMPolicy", "LimitMEMLOCK"),
        *("UMask", "NoNewPrivileges", "LockPersonality", "RestrictSUIDSGID", "RestrictRealtime"),
        *("RestrictNamespaces", "RestrictAddressFamilies"),
        *("SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber"),
    }
)


class Refused(Exception):
    """Refusal, whose text tells the operator the problem and the fix."""


@dataclass(frozen=True)
class Place:
    """Paths of all files on this host, and their owner."""

    #: Owned by the user who logs in.
    folder: Path
    #: Owned by the user that runs the agent; the same folder unless root logs in.
    state: Path
    user: str

    @property
    def is_demoted(self) -> bool:
        """True if root logs in and the agent runs as another user."""
        return os.geteuid() == 0 and self.user != "root"

    @property
    def credentials(self) -> Path:
        return self.state / "credentials"

    def account(self) -> pwd.struct_passwd:
        """Return the agent's user. Raise Refused if there is no such user."""
        try:
            found = pwd.getpwnam(self.user)
        except KeyError:
            raise Refused(f"there is no user {self.user}; run 'oobleck up' again") from None
        if found.pw_uid == 0 and self.user != "root":
            raise Refused(f"{self.user} is root by another name; ask for root with --run-as root")
        return found

    def demotion(self) -> dict[str, Any]:
        """Return subprocess's arguments to run a program as the agent's user, in its folder."""
        if not self.is_demoted:
            return {"cwd": self.state}
        account = self.account()
        plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OOBLECK_", "SSH_", "XDG_"))
        }
        return {
            "cwd": self.state,
            "user": account.pw_uid,
            "group": account.pw_gid,
            "extra_groups": os.getgrouplist(self.user, account.pw_gid),
            "env": {**plain, "HOME": str(self.state), "USER": self.user, "LOGNAME": self.user},
        }


def place(directory: str, run_as: str) -> Place:
    """Return the place that a request names. Empty: the default folder, the default user. Raise
    Refused."""
    if os.geteuid() == 0:
        folder = Path(directory or _OF_ROOT).expanduser().absolute()
        return Place(folder, folder / "state", run_as or _USER)
    me = _name(os.geteuid())
    if run_as not in ("", me):
        raise Refused(f"{me} cannot start an agent as {run_as}; log in as root, or as {run_as}")
    folder = Path(directory or _OF_OTHERS).expanduser().absolute()
    return Place(folder, folder, me)


def main(request: dict[str, Any]) -> None:
    # Files that root puts there have no secret, and the agent's user reads them.
    os.umask(0o022 if os.geteuid() == 0 else 0o077)
    asked = (request.pop("directory"), request.pop("run_as", ""))
    actions: dict[str, Callable[..., dict[str, Any]]] = {
        "look": look,
        "make": make,
        "install": install,
        "join": join,
        "start": start,
        "state": state,
        "stop": stop,
    }
    action = actions[request.pop("action")]
    reply: dict[str, Any]
    try:
        reply = {"reply": action(place(*asked), **request)}
    except Refused as refused:
        reply = {"refused": str(refused)}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        reply = {"refused": f"{where}{error.strerror}"}
    print(json.dumps(reply))


# ---- looking


def look(at: Place, key: str, agent: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the host. `key`: key of the wanted installation; `agent`: as for
    `start`."""
    if importlib.util.find_spec("ensurepip") is None:
        raise Refused(
            f"{sys.executable} ({platform.python_version()}) cannot make a virtual environment; "
            "install python3-venv there, or name another with --python"
        )
    nearest = at.folder
    while not nearest.exists():
        nearest = nearest.parent
    _check_reach(at, nearest)
    mine = at.state.exists() and _name(at.state.stat().st_uid) == at.user
    recorded = _recorded(at)
    wanted = _wanted(at, key, agent)
    return {
        "folder": str(at.folder),
        "free_bytes": shutil.disk_usage(nearest).free,
        "wheels": [f"{path.parent.name}/{path.name}" for path in at.folder.glob("wheels/*/*.whl")],
        "installed": (at.folder / "venvs" / key / "whole").exists(),
        "certificate": _text(at.credentials / "client.crt") if mine else "",
        "authority": _text(at.credentials / "ca.crt") if mine else "",
        "same": all(recorded.get(name) == value for name, value in wanted.items()),
        **state(at),
    }


def _check_reach(at: Place, folder: Path) -> None:
    """Raise Refused if the agent's user has no access to the programs or to Python."""
    if not at.is_demoted:
        return
    for path, option in ((folder, "--directory"), (Path(sys.executable).resolve(), "--python")):
        for one in (path, *path.parents):
            if not one.stat().st_mode & stat.S_IXOTH:
                raise Refused(
                    f"{one} is closed to others, so user {at.user} cannot use {path}; name another "
                    f"with {option}, or another user with --run-as"
                )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def state(at: Place) -> dict[str, Any]:
    """Return the agent's `pid` (0: not running), its `last` line of output, and its `log`."""
    log = at.folder / "agent.log"
    return {"pid": _pid(_recorded(at)), "last": _last_line(log), "log": str(log)}


def _text(path: Path) -> str:
    """Return the file's text; empty if it is missing, or replaced by something else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return ""
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return file.read(_MOST_TEXT_BYTES).decode(errors="replace")


def _last_line(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def _recorded(at: Place) -> dict[str, Any]:
    """Return the record of the last started agent."""
    text = _text(at.folder / "agent.json")
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _pid(agent: dict[str, Any]) -> int:
    """Return the running agent's process id; 0: not running."""
    if "unit" in agent:
        shown = _systemctl(agent["unit"], "show", "--property=MainPID", "--value", _UNIT)
        return int(shown.strip() or 0)
    pid = int(agent.get("pid", 0))
    return pid if pid and _began(pid) == agent["began"] else 0


def _began(pid: int) -> str:
    """Return the boot, and the ticks since then, at which a process began; empty: it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    if fields[0] in "ZX":
        return ""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + fields[19]


@contextlib.contextmanager
def _locked(at: Place) -> Iterator[None]:
    """Lock the folder, so that one command at a time changes it."""
    with (at.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- installing and joining


def make(at: Place) -> dict[str, Any]:
    """Make the folder before files are copied there: an ssh server may make it inaccessible."""
    at.folder.mkdir(parents=True, exist_ok=True)
    return {}


def install(
    at: Place, key: str, wheels: list[str], requirements: str, constraint: str, alone: bool
) -> dict[str, Any]:
    """Make venvs/KEY.

    `wheels`: paths below wheels/, Oobleck's first. `requirements`: requirements file for pip with
    hashes, installed first; may be empty. `constraint`: constraints file for all others; may be
    empty. `alone`: only these wheels may be installed.
    """
    target = at.folder / "venvs" / key
    paths = [at.folder / "wheels" / wheel for wheel in wheels]
    with _locked(at):
        if (target / "whole").exists():
            return {}
        shutil.rmtree(target, ignore_errors=True)
        _run("python -m venv", [sys.executable, "-P", "-m", "venv", str(target)])
        pip = [str(target / "bin" / "python"), "-P", "-m", "pip", "install", "--no-input"]
        pip += ["--quiet", "--disable-pip-version-check", *(["--no-index"] if alone else [])]
        for path in paths[1:]:
            pip += ["--find-links", str(path.parent)]
        if requirements:
            hashed = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement"]
            with _file(at, requirements) as name:
                _run("pip", [*pip, *hashed, name])
        with _file(at, constraint) as name:
            _run("pip", [*pip, "--constraint", name, str(paths[0])])
        (target / "whole").touch()
        for old in set(at.folder.glob("wheels/*/*")) - set(paths):
            old.unlink()
    return {}


@contextlib.contextmanager
def _file(at: Place, text: str, *, for_agent: bool = False) -> Iterator[str]:
    """Yield the path of a file with the text. Only the user who logs in may read it or, with
    `for_agent`, the agent's user."""
    with tempfile.NamedTemporaryFile("w", dir=at.folder, suffix=".txt") as file:
        if for_agent and at.is_demoted:
            os.fchown(file.fileno(), at.account().pw_uid, -1)
        file.write(text)
        file.flush()
        yield file.name


def join(at: Place, key: str, master: str, name: str, token: str) -> dict[str, Any]:
    """Get the node's certificate with the token, which no other user of the host sees."""
    command = [str(at.folder / "venvs" / key / "bin" / "oobleck"), "pki", "join", name]
    command += ["--master", master, "--credentials", str(at.credentials)]
    with _locked(at):
        _make_state(at)
        with _file(at, token, for_agent=True) as file:
            _run("joining", [*command, "--token-file", file], **at.demotion())
    return {}


def _make_state(at: Place) -> None:
    """Make the agent's own folder and its user if missing. Raise Refused."""
    if at.is_demoted:
        _make_user(at.user)
    owner = _name(at.state.stat().st_uid) if at.state.exists() else at.user
    if at.state != at.folder and owner != at.user:
        raise Refused(
            f"{at.state} belongs to {owner}, and may contain files of jobs: give --run-as {owner}, "
            "or remove it first with `oobleck down --purge`"
        )
    at.state.mkdir(mode=0o700, exist_ok=True)
    if at.is_demoted:
        os.chown(at.state, at.account().pw_uid, at.account().pw_gid)


def _make_user(name: str) -> None:
    """Make the user if missing. Raise Refused."""
    with contextlib.suppress(KeyError):
        pwd.getpwnam(name)
        return
    command = [
        "useradd",
        "--system",
        "--user-group",
        "--no-create-home",
        "--home-dir",
        "/nonexistent",
    ]
    program = shutil.which(command[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise Refused(
            f"there is no user {name}, and no useradd; create it, name another with --run-as, "
            "or ask for root with --run-as root"
        )
    _run("useradd", [program, *command[1:], "--shell", "/usr/sbin/nologin", name])


def _run(what: str, command: list[str], **how: Any) -> None:
    """Run a program. Raise Refused with its last error line."""
    given: dict[str, str] = how.pop("env", dict(os.environ))
    plain = {name: value for name, value in given.items() if not name.startswith("OOBLECK_")}
    done = subprocess.run(command, capture_output=True, text=True, env=plain, check=False, **how)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")] or lines or ["no output"]
        raise Refused(f"{what} ends with exit code {done.returncode}: {errors[-1].strip()}")


# ---- starting and stopping


def start(at: Place, key: str, agent: dict[str, Any]) -> dict[str, Any]:
    """Run the agent of venvs/KEY as asked, and no other one; return its state.

    `agent`: its `options`, the text of deploy's `unit`, and folders that are `writable` for jobs.
    """
    wanted = _wanted(at, key, agent)
    with _locked(at):
        recorded = _recorded(at)
        same = all(recorded.get(name) == value for name, value in wanted.items())
        if same and state(at)["pid"]:
            return state(at)
        _make_state(at)
        _stop(at, now=False)
        _start(at, wanted)
        for old in [path for path in (at.folder / "venvs").iterdir() if path.name != key]:
            shutil.rmtree(old)
        return state(at)


def _wanted(at: Place, key: str, agent: dict[str, Any]) -> dict[str, Any]:
    """Return the record in agent.json of an agent started this way. Raise Refused."""
    command = [str(at.folder / "venvs" / key / "bin" / "oobleck-agent"), *agent["options"]]
    command += ["--credentials", str(at.credentials)]
    wanted: dict[str, Any] = {"command": command, "user": at.user}
    if (scope := _scope()) is not None:
        wanted["unit"] = scope
        wanted["text"] = unit(agent["unit"], at, command, scope, agent["writable"])
    return wanted


def _start(at: Place, wanted: dict[str, Any]) -> None:
    log_path = at.folder / "agent.log"
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        if (scope := wanted.get("unit")) is not None:
            path = _unit_folder(scope) / _UNIT
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted["text"])
            path.chmod(0o644)
            _record(at, wanted)
            _systemctl(scope, "daemon-reload")
            _systemctl(scope, "enable", "--quiet", _UNIT)
            _systemctl(scope, "restart", _UNIT)
            return
        process = subprocess.Popen(
            wanted["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            **at.demotion(),
        )
    finally:
        os.close(log)
    _record(at, {**wanted, "pid": process.pid, "began": _began(process.pid)})


def _record(at: Place, agent: dict[str, Any]) -> None:
    new = at.folder / "agent.json.new"
    new.write_text(json.dumps(agent))
    new.replace(at.folder / "agent.json")


def stop(at: Place, now: bool, purge: bool) -> dict[str, Any]:
    """End the agent and its descendants. `now`: without moving its work off first. `purge`: remove
    all files of `up`."""
    done = {"stopped": False, "purged": False}
    if not (at.folder / "lock").exists():
        return done
    with _locked(at):
        done["stopped"] = _stop(at, now=now)
        if purge:
            for name in _PARTS:
                path = at.folder / name
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files stay
                at.folder.rmdir()
            done["purged"] = True
    return done


def _stop(at: Place, *, now: bool) -> bool:
    """Stop the agent, after its drain unless `now`; return whether it was running. Raise
    Refused."""
    agent = _recorded(at)
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
    # Descendants end with the agent; wait for those that the kernel cannot end at once.
    left = _until_ended({**below, **({pid: agent["began"]} if "began" in agent else {})}, _END_S)
    for one in left:
        _signal(one, signal.SIGKILL)
    if _until_ended(left, _END_S):
        raise Refused(f"pid {', '.join(map(str, left))} does not end; check the host")
    (at.folder / "agent.json").unlink(missing_ok=True)
    return bool(pid)


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _below(pid: int) -> dict[int, str]:
    """Return all descendants of a process, and when each began."""
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
    """Wait until the processes end, at most `most_s`; return the remaining ones."""
    deadline = time.monotonic() + most_s
    while True:
        processes = {pid: began for pid, began in processes.items() if _began(pid) == began}
        if not processes or time.monotonic() > deadline:
            return processes
        time.sleep(0.02)


# ---- systemd


def _scope() -> str | None:
    """Return which systemd keeps the agent running, `system` or `user`; None: none."""
    if os.geteuid() == 0:
        return "system" if Path("/run/systemd/system").is_dir() else None
    # A user's systemd ends with the last login, unless lingering is enabled.
    user = Path("/var/lib/systemd/linger", os.environ.get("USER", "-")).exists()
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    return "user" if user and Path(runtime, "systemd", "private").exists() else None


def _unit_folder(scope: str) -> Path:
    if scope == "system":
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"), "systemd", "user")


def _systemctl(scope: str, *arguments: str) -> str:
    """Run systemctl and return its output. Raise Refused."""
    runtime = {"XDG_RUNTIME_DIR": f"/run/user/{os.geteuid()}"} if scope == "user" else {}
    command = ["systemctl", f"--{scope}", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**runtime, **os.environ}, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise Refused(f"{' '.join(command)} ends with exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def unit(text: str, at: Place, command: Sequence[str], scope: str, writable: Sequence[str]) -> str:
    """Return deploy's unit with this host's values.

    `scope`: root's or a user's systemd; a user's gets only keys that it supports. `writable`:
    folders that jobs may write to. Raise Refused.
    """
    lines = ["# Written by 'oobleck up', which replaces it; 'oobleck down' removes it."]
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line[0] in "#;":
            continue
        if line.startswith("["):
            lines += _own(at, command, scope, writable) if section == "[Service]" else []
            section = line
        key = line.partition("=")[0]
        unknown = scope == "user" and key not in _IN_USERS_UNITS
        if section == "[Service]" and line != section and (key in _REPLACED or unknown):
            continue
        if key == "WantedBy" and scope == "user":
            line = "WantedBy=default.target"
        lines.append(line)
    return "\n".join([*lines, ""])


def _own(at: Place, command: Sequence[str], scope: str, writable: Sequence[str]) -> list[str]:
    """Return the lines that replace deploy's in the section Service. Raise Refused."""
    lines = [
        f"ExecStart={' '.join(map(_quoted, command))}",
        f"WorkingDirectory={_plain(at.state)}",
        f"StandardOutput=append:{_plain(at.folder / 'agent.log')}",
        "StandardError=inherit",
        # A final refusal by the master is not retried.
        "RestartPreventExitStatus=2",
    ]
    if scope == "user":
        return lines
    for path in writable:
        if not Path(path).is_absolute() or not Path(path).is_dir():
            raise Refused(
                f"--writable {path}: the folder does not exist; make it there, or mount it"
            )
    paths = " ".join(_quoted(str(path)) for path in (at.state, *writable))
    home = _quoted(f"HOME={at.state}").replace("$$", "$")  # $ is not expanded there
    return [f"User={at.user}", f"Environment={home}", f"ReadWritePaths={paths}", *lines]


def _plain(path: Path) -> str:
    """Escape a path for a value that is one path."""
    return str(path).replace("%", "%%")


def _quoted(word: str) -> str:
    """Quote a word of ExecStart."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(plain, escaped)
    return f'"{word}"'

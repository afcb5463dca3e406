"""Connections to hosts by ssh: requests to `remote` there, copied files, and work on many at once.

Host keys are always checked against known_hosts. Nobody is asked for a password, and the operator's
ssh-agent is not forwarded. Every failure is a HostFailed of one line with the fix.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import asyncssh
import click

from oobleck.cli.output.progress import Progress
from oobleck.cli.ssh.hosts import KNOWN_HOSTS, Access, Host, HostFailed
from oobleck.core.units import count
from oobleck.host.command import FAILED
from oobleck.host.display import one_line

CONNECT_S = 10.0
LOGIN_S = 20.0
#: Deadline of a request; an installation may download gigabytes.
MOST_S = 3600.0
_TOO_OLD = "too old: "
#: The text of `remote` is sent over standard input with the request, so other users cannot see it.
_BOOTSTRAP = (
    f'import sys; print("{_TOO_OLD}%d.%d" % sys.version_info[:2]) '
    "if sys.version_info < (3, 11) else exec(sys.stdin.read())"
)
_REMOTE = ("oobleck.cli.ssh", "remote.py")
_NOT_THERE = 127
_NOT_RUN = 126

# The command reports a failed connection in one line; the library's log would repeat it.
logging.getLogger("asyncssh").setLevel(logging.CRITICAL)


class _Client(asyncssh.SSHClient):
    """Client that refuses unknown host keys, and remembers them."""

    key = ""

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        self.key = f"{key.get_algorithm()} {key.get_fingerprint()}"
        return False


class Connection:
    def __init__(self, ssh: asyncssh.SSHClientConnection, access: Access) -> None:
        self._ssh = ssh
        self._access = access

    async def call(
        self, action: str, *, script: tuple[str, str] = _REMOTE, **arguments: object
    ) -> dict[str, Any]:
        """Run an action of a script in a package (default: `remote`); return its answer. Raise
        HostFailed."""
        access = self._access
        request = {"action": action, "directory": access.directory, **arguments}
        if access.run_as:
            request["run_as"] = access.run_as
        package, name = script
        text = files(package).joinpath(name).read_text()
        asked = f"{text}\nmain(json.loads({json.dumps(request)!r}))\n"
        command = shlex.join([self._access.python, "-c", _BOOTSTRAP])
        try:
            done = await self._ssh.run(command, input=asked, timeout=MOST_S, check=False)
        except (asyncssh.Error, OSError) as error:
            raise HostFailed(f"the connection ended during '{action}': {error}") from error
        output, errors = str(done.stdout or ""), str(done.stderr or "")
        if done.exit_status in (_NOT_THERE, _NOT_RUN):
            raise HostFailed(
                f"{self._access.python!r} cannot be run; install Python 3.11 or "
                "newer there, or name it with --python"
            )
        last = (output.strip() or errors.strip() or "no output").splitlines()[-1]
        if last.startswith(_TOO_OLD):
            raise HostFailed(
                f"{self._access.python} is {last.removeprefix(_TOO_OLD)}; at least 3.11 is "
                "needed: name another with --python"
            )
        try:
            reply: dict[str, Any] = json.loads(last)
        except ValueError:
            code = done.exit_status
            raise HostFailed(f"'{action}' ends there with exit code {code}: {last}") from None
        if "refused" in reply:
            raise HostFailed(reply["refused"])
        found: dict[str, Any] = reply["reply"]
        return found

    async def put(self, source: Path, target: str) -> None:
        """Copy a file atomically. Raise HostFailed."""
        folder = target.rpartition("/")[0]
        part = f"{target}.{secrets.token_hex(4)}.part"
        try:
            async with self._ssh.start_sftp_client() as sftp:
                await sftp.makedirs(folder, exist_ok=True)
                try:
                    await sftp.put(str(source), part)
                    await sftp.posix_rename(part, target)
                except BaseException:
                    with contextlib.suppress(asyncssh.SFTPError):
                        await sftp.remove(part)
                    raise
        except asyncssh.ChannelOpenError as error:
            text = "its ssh server has no SFTP; enable 'Subsystem sftp' in its sshd_config"
            raise HostFailed(text) from error
        except (asyncssh.Error, OSError) as error:
            text = f"{source.name} cannot be copied to {folder} ({error}); make room there, or "
            raise HostFailed(f"{text}name another place with --directory") from error


@contextlib.asynccontextmanager
async def connected(host: Host, access: Access) -> AsyncIterator[Connection]:
    """Connect to a host. Raise HostFailed."""
    client = _Client()
    known = access.key_files
    options: dict[str, Any] = {"client_keys": [str(access.identity)]} if access.identity else {}
    if host.user:
        options["username"] = host.user
    if host.port is not None:
        options["port"] = host.port
    try:
        ssh, _ = await asyncssh.create_connection(
            lambda: client,
            host.address,
            known_hosts=known or b"",
            agent_forwarding=False,
            password_auth=False,
            kbdint_auth=False,
            connect_timeout=CONNECT_S,
            login_timeout=LOGIN_S,
            keepalive_interval=10,
            **options,
        )
    except (asyncssh.Error, OSError, ValueError) as error:
        raise HostFailed(_why(error, host, client.key, known, access)) from error
    try:
        yield Connection(ssh, access)
    finally:
        ssh.close()
        with contextlib.suppress(asyncssh.Error, OSError):
            await ssh.wait_closed()


def _why(error: Exception, host: Host, key: str, known: list[str], access: Access) -> str:
    match error:
        case asyncssh.HostKeyNotVerifiable() | asyncssh.KeyExchangeFailed() if key or _keys(
            host, known
        ):
            return _about_key(host, key, known, access)
        case asyncssh.PermissionDenied():
            given = f"the key {access.identity}" if access.identity else "all your keys"
            return (
                f"it refuses {given}; 'ssh-copy-id {host.user or 'USER'}@{host.address}' adds one"
            )
        case asyncssh.KeyImportError() | asyncssh.KeyEncryptionError():
            text = f"--identity {access.identity}: {one_line(str(error))}"
            return f"{text}; put it into the ssh-agent with ssh-add, and leave --identity out"
        case ConnectionRefusedError():
            return "its ssh port is closed; start sshd there, or give the port as host:port"
        case TimeoutError():
            return "no answer to ssh in time; check that it is up, and its name or address"
        case OSError():
            return f"cannot be reached by ssh: {error.strerror or error}"
        case _:
            return f"no connection by ssh: {one_line(str(error))}"


def _keys(host: Host, known: list[str]) -> bool:
    """Return whether any key of the host is known."""
    if not known:
        return False
    port = None if host.port in (None, 22) else host.port
    return any(asyncssh.match_known_hosts(known, host.address, "", port)[:2])


def _about_key(host: Host, key: str, known: list[str], access: Access) -> str:
    file = access.known_hosts or KNOWN_HOSTS[0]
    port = f"-p {host.port} " if host.port is not None else ""
    scan = f"ssh-keyscan {port}{host.address} >> {file}"
    if not _keys(host, known):
        return (
            f"its host key ({key}) is unknown; compare it with the host's own (ssh-keygen -lf "
            f"/etc/ssh/ssh_host_*_key.pub there), then '{scan}'"
        )
    name = host.address if host.port in (None, 22) else f"[{host.address}]:{host.port}"
    return (
        f"its host key HAS CHANGED ({key or 'to one of another kind'}): the connection may "
        "be intercepted. Only if the host was reinstalled: "
        f"'ssh-keygen -f {file} -R {shlex.quote(name)}', then '{scan}'"
    )


# ---- concurrent work on many hosts, and a line for each result


#: Receives the current work on a host, for display.
Say = Callable[[str], None]
#: Does the work on a host; returns descriptions of the changes; empty: the host was up to date.
#: Raises HostFailed.
Work = Callable[[Host, Say], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    host: Host
    done: Sequence[str]
    #: Empty: no problem.
    problem: str
    seconds: float

    @property
    def summary(self) -> str:
        took = f" in {self.seconds:.1f} s" if self.done else ""
        text = f"FAILED: {self.problem}" if self.problem else ", ".join(self.done) or "as it was"
        return f"{text}{took}" if not self.problem else text


async def on_each(
    hosts: Sequence[Host], work: Work, *, parallel: int, as_json: bool
) -> list[Outcome]:
    """Do the work on each host; return the outcomes in the hosts' order. Without `as_json`, print
    each as it ends, and on standard error what is done meanwhile."""
    began = time.monotonic()
    turns = asyncio.Semaphore(parallel)
    progress = Progress([host.name for host in hosts], sys.stderr, click.echo)

    def say(host: Host, work: str) -> None:
        if not as_json:
            progress.begins(host.name, work)

    async def one(host: Host) -> Outcome:
        async with turns:
            start = time.monotonic()
            done: Sequence[str] = ()
            problem = ""
            try:
                done = await work(host, partial(say, host))
            except HostFailed as failed:
                problem = str(failed)
            outcome = Outcome(
                host=host, done=done, problem=problem, seconds=time.monotonic() - start
            )
        if not as_json:
            progress.ended(host.name, f"{host}  {outcome.summary}", failed=bool(problem))
        return outcome

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(host)) for host in hosts]
    outcomes = [task.result() for task in running]
    summarise(outcomes, time.monotonic() - began, as_json=as_json)
    return outcomes


def summarise(outcomes: Sequence[Outcome], seconds: float, *, as_json: bool) -> None:
    if as_json:
        found = [
            {
                "name": outcome.host.name,
                "host": str(outcome.host),
                "line": outcome.host.line,
                "ok": not outcome.problem,
                "done": list(outcome.done),
                "problem": outcome.problem,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ]
        click.echo(json.dumps({"hosts": found, "seconds": round(seconds, 3)}, indent=2))
        return
    failed = sum(bool(outcome.problem) for outcome in outcomes)
    failures = f", {failed} failed" if failed else ""
    click.echo(f"{count(len(outcomes), 'host')}{failures}, in {seconds:.1f} s")


def exit_code(outcomes: Sequence[Outcome]) -> int:
    return FAILED if any(outcome.problem for outcome in outcomes) else 0

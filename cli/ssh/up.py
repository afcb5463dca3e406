"""`oobleck up` and `oobleck down`: agents on all hosts of a file, by ssh.

Hosts that are up to date are not changed.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oobleck.cli.client import MasterClient
from oobleck.cli.cluster.pki import make_token
from oobleck.cli.options import master_option
from oobleck.cli.output.text import GONE
from oobleck.cli.ssh.hosts import Access, Host, HostFailed, hosts_argument, read_hosts, ssh_options
from oobleck.cli.ssh.payload import UNIT, Payload, make_payload, shipped
from oobleck.core.units import format_bytes
from oobleck.host.address import is_loopback, split_address
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

if TYPE_CHECKING:
    from oobleck.cli.ssh.connection import Connection, Say
    from oobleck.cli.ssh.rolling import Rolling


# ---- oobleck up


#: Lifetime of a join token, which is used at once.
_TOKEN_S = 600.0
#: Longest wait until the master knows a started agent.
_KNOWN_S = 60.0
_POLL_S = 0.3
#: Interval of asking the host whether its agent still runs.
_LOOK_S = 2.0
#: Options of agents that only `up` may give.
_OURS = ("--master", "--name", "--credentials", "--token-file", "--insecure")
#: Options about code of jobs.
_CODE = ("--accept-code", "--no-accept-code", "--allow-code")
_NO_CODE = (
    "note: these agents run no code that comes with jobs; 'oobleck up {file} -- --accept-code' "
    "lets every operator's jobs run theirs (--no-accept-code: no note)"
)


@click.command(
    epilog="Exit codes: 0 all hosts are up, 1 not all of them (each line says why), 2 wrong usage, "
    "4 no master answers, 5 denied."
)
@hosts_argument
@click.argument("agent_options", metavar="[-- AGENT-OPTION...]", nargs=-1)
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Oobleck's wheel.  [default: packed from this installation]",
)
@click.option(
    "--with-dependencies",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Copy the wheels in DIR too, and install nothing from elsewhere.",
)
@click.option(
    "--constraint",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Versions for pip.  [default: this release's, with the hashes of all but torch]",
)
@click.option(
    "--run-as",
    default="",
    metavar="USER",
    help="User that runs agents on hosts where you log in as root; created if missing. "
    "'root' is allowed.  [default: oobleck]",
)
@click.option(
    "--writable",
    multiple=True,
    metavar="DIR",
    help="Folder of jobs' checkpoints and outputs on the hosts: root's systemd lets them write "
    "only there. May be repeated.",
)
@click.option(
    "--rolling",
    type=click.IntRange(1, 1000),
    metavar="K",
    help="Restart running agents of K hosts at a time: drain each node, and go on once it takes "
    "part again. A node that a job cannot spare, or that does not come back, ends that.",
)
@click.option(
    "--force",
    is_flag=True,
    help="With --rolling: drain also nodes that a job cannot spare, as 'oobleck node drain "
    "--force' does.",
)
@click.option("--dry-run", is_flag=True, help="Only show the steps.")
@ssh_options
@master_option
def up(
    file: Path,
    agent_options: tuple[str, ...],
    wheel: Path | None,
    with_dependencies: Path | None,
    constraint: Path | None,
    run_as: str,
    writable: tuple[str, ...],
    rolling: int | None,
    force: bool,
    dry_run: bool,
    identity: Path | None,
    known_hosts: Path | None,
    python: str,
    directory: str,
    parallel: int,
    as_json: bool,
    master: Endpoint,
) -> int:
    """Run an agent on each host of HOSTS.txt: copy Oobleck there by ssh, install it, let the node
    join, start its agent and wait until the master knows it.

    A line of HOSTS.txt is [user@]host[:port] [name=NAME] [workers=G] [device=cpu|cuda]
    [gpus=GPU,...] [rack=NAME]. A repeated call makes only the missing changes. The master must be
    running, and needs an operator's credentials; options after -- are passed to every agent.
    """
    if force and rolling is None:
        raise click.UsageError("--force: requires --rolling; give both, or neither")
    hosts = read_hosts(file)
    check_master(master, hosts)
    for option in agent_options:
        if option.partition("=")[0] in _OURS:
            raise click.UsageError(f"{option}: leave it out; 'oobleck up' sets it")
    from oobleck.cli.ssh.connection import exit_code, on_each
    from oobleck.cli.ssh.rolling import Rolling

    access = Access(
        identity=identity,
        known_hosts=known_hosts,
        python=python,
        directory=directory,
        run_as=run_as,
    )
    with tempfile.TemporaryDirectory() as scratch, MasterClient(master) as connection:
        connection.nodes()  # fails at once if the master does not answer
        payload = make_payload(wheel, with_dependencies, constraint, python, Path(scratch))
        if not as_json and not any(one.startswith(_CODE) for one in agent_options):
            click.echo(f"oobleck: {_NO_CODE.format(file=file)}", err=True)
        bringing = _Bringing(
            access=access,
            payload=payload,
            endpoint=master,
            options=agent_options,
            writable=writable,
            roll=_Roll(connection),
            rolling=None if rolling is None else Rolling(connection, rolling, force=force),
            dry_run=dry_run,
        )
        return exit_code(
            asyncio.run(on_each(hosts, bringing.up, parallel=parallel, as_json=as_json))
        )


def check_master(master: Endpoint, hosts: Sequence[Host]) -> None:
    """Raise CommandFailed unless agents on the hosts may reach it and be admitted."""
    away = next((host for host in hosts if not is_loopback(host.address)), None)
    loops = (one for one in master.addresses if is_loopback(split_address(one)[0]))
    if away is not None and (address := next(loops, None)) is not None:
        raise CommandFailed(
            f"--master {address}: {away.address} cannot reach it; give the address by "
            "which hosts reach the master, as in --master 10.0.0.1:7070",
            USAGE,
        )
    if master.credentials is None:
        raise CommandFailed(
            f"--master {master}: admitting nodes requires an operator's credentials; give "
            "--credentials DIR, or OOBLECK_CREDENTIALS ('oobleck pki init' makes the first)",
            USAGE,
        )


class _Roll:
    """Nodes as the master lists them, asked once for all tasks."""

    def __init__(self, master: MasterClient) -> None:
        self.master = master
        self._lock = asyncio.Lock()
        self._asked_at = 0.0
        self._nodes: dict[str, pb.NodeInfo] = {}

    async def pid_of(self, name: str) -> tuple[int, str]:
        """Return process and host of the agent with a session as this node; 0: there is none. Raise
        CommandFailed."""
        async with self._lock:
            if time.monotonic() - self._asked_at > _POLL_S:
                found = await asyncio.to_thread(self.master.nodes)
                self._nodes = {node.node: node for node in found}
                self._asked_at = time.monotonic()
        node = self._nodes.get(name)
        if node is None or node.state in (*GONE, "disconnected"):
            return 0, ""
        return node.pid, node.hostname


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bringing:
    access: Access
    payload: Payload
    endpoint: Endpoint
    options: tuple[str, ...]
    writable: tuple[str, ...]
    roll: _Roll
    #: None: agents restart when they can.
    rolling: "Rolling | None"
    dry_run: bool

    async def up(self, host: Host, say: "Say") -> list[str]:
        """Bring the host's agent up; return what was done. Raise HostFailed."""
        from oobleck.cli.ssh.connection import connected

        say("connecting")
        try:
            async with connected(host, self.access) as connection:
                return await self._steps(host, connection, say)
        except CommandFailed as failed:  # from the master
            raise HostFailed(failed.format_message()) from failed

    async def _steps(self, host: Host, connection: "Connection", say: "Say") -> list[str]:
        key = self.payload.key
        options = ["--master", str(self.endpoint), "--name", host.name, *host.agent_options]
        agent = {
            "options": [*options, *self.options],
            "unit": shipped(UNIT),
            "writable": list(self.writable),
        }
        found = await connection.call("look", key=key, agent=agent)
        done = []
        if not found["installed"]:
            wheels = [wheel for wheel in self.payload.wheels if wheel.place not in found["wheels"]]
            self._check_room(found)
            done.append(f"copied {format_bytes(sum(wheel.bytes for wheel in wheels))}")
            done.append("installed")
            if not self.dry_run:
                say("installing")
                await self._install(connection, found["folder"], wheels)
        if not self._has_joined(host, found):
            await self._check_name(host, found)
            done.append("joined")
            if not self.dry_run:
                await self._join(host, connection)
        if not (found["same"] and found["pid"] and not done):
            done.append("started" if not found["pid"] else "started anew")
        if self.dry_run:
            return [f"would be {word}" for word in done]
        turn: AbstractAsyncContextManager[None] = nullcontext()
        if self.rolling is not None and found["pid"] and done:
            turn = self.rolling.turn(host.name, say)
        async with turn:
            say("starting")
            started = await connection.call("start", key=key, agent=agent)
            await self._await_known(host, connection, started)
        return done

    def _check_room(self, found: dict[str, Any]) -> None:
        """Raise HostFailed unless there is enough space."""

        needed = sum(wheel.unpacked_bytes for wheel in self.payload.wheels)
        needed += sum(
            wheel.bytes for wheel in self.payload.wheels if wheel.place not in found["wheels"]
        )
        if found["free_bytes"] < needed:
            raise HostFailed(
                f"{found['folder']} has room for {format_bytes(found['free_bytes'])}, and "
                f"{format_bytes(needed)} are needed; make room there, or name another place with "
                "--directory"
            )

    async def _install(self, connection: "Connection", folder: str, wheels: Sequence[Any]) -> None:
        await connection.call("make")
        for wheel in wheels:
            await connection.put(wheel.path, f"{folder}/wheels/{wheel.place}")
        await connection.call(
            "install",
            key=self.payload.key,
            wheels=[wheel.place for wheel in self.payload.wheels],
            requirements=self.payload.requirements,
            constraint=self.payload.constraint,
            alone=self.payload.alone,
        )

    def _has_joined(self, host: Host, found: dict[str, Any]) -> bool:
        """Return whether the host has a valid certificate of this node and cluster."""
        from oobleck.host.security import pki

        try:
            identity = pki.identity_of(found["certificate"].encode())
            authority = pki.fingerprint(found["authority"].encode())
        except ValueError:
            return False
        assert self.endpoint.credentials is not None, "checked before"
        ours = pki.fingerprint(self.endpoint.credentials.authority)
        holder = (identity.role, identity.name, authority)
        return holder == ("agent", host.name, ours) and identity.expires_at > time.time()

    async def _check_name(self, host: Host, found: dict[str, Any]) -> None:
        """Raise HostFailed if another agent has the name; a token would take it away."""

        pid, hostname = await self.roll.pid_of(host.name)
        if pid not in (0, found["pid"]):
            raise HostFailed(
                f"another agent is node {host.name} (pid {pid} on {hostname}); end that, or give "
                "this host another name="
            )

    async def _join(self, host: Host, connection: "Connection") -> None:
        token = await asyncio.to_thread(
            make_token, self.roll.master, role="agent", name=host.name, ttl_s=_TOKEN_S
        )
        await connection.call(
            "join",
            key=self.payload.key,
            master=str(self.endpoint),
            name=host.name,
            token=token,
        )

    async def _await_known(
        self, host: Host, connection: "Connection", agent: dict[str, Any]
    ) -> None:
        """Wait until the master knows the agent. Raise HostFailed."""

        deadline = time.monotonic() + _KNOWN_S
        look_at = time.monotonic() + _LOOK_S
        while agent["pid"] == 0 or (await self.roll.pid_of(host.name))[0] != agent["pid"]:
            if time.monotonic() > look_at:
                agent = await connection.call("state")
                look_at = time.monotonic() + _LOOK_S
            log = f"{agent['log']} there: {inline(agent['last'])}"
            if not agent["pid"]:
                raise HostFailed(f"its agent has ended; the last line of {log}")
            if time.monotonic() > deadline:
                text = f"the master does not know its agent after {_KNOWN_S:.0f} s; the last line"
                raise HostFailed(f"{text} of {log}")
            await asyncio.sleep(_POLL_S)


# ---- oobleck down


@click.command(
    epilog="Exit codes: 0 nothing of Oobleck runs on the hosts, 1 not on all of them (each line "
    "says why), 2 wrong usage."
)
@hosts_argument
@click.option(
    "--now", is_flag=True, help="End agents at once, without moving their work off first."
)
@click.option(
    "--purge",
    is_flag=True,
    help="Also remove all files of 'oobleck up', including the node's certificate.",
)
@ssh_options
def down(
    file: Path,
    now: bool,
    purge: bool,
    identity: Path | None,
    known_hosts: Path | None,
    python: str,
    directory: str,
    parallel: int,
    as_json: bool,
) -> int:
    """End the agents on the hosts of HOSTS.txt that 'oobleck up' has started. Each drains its node
    first, as with SIGTERM; if too few nodes are left, jobs wait for nodes. Needs no master.
    """
    hosts = read_hosts(file)
    from oobleck.cli.ssh.connection import exit_code, on_each

    access = Access(identity=identity, known_hosts=known_hosts, python=python, directory=directory)
    ending = _Ending(access=access, now=now, purge=purge)
    return exit_code(asyncio.run(on_each(hosts, ending.down, parallel=parallel, as_json=as_json)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    access: Access
    now: bool
    purge: bool

    async def down(self, host: Host, say: "Say") -> list[str]:
        """Stop the host's agent and, if asked, remove its folder; return what was done. Raise
        HostFailed."""
        from oobleck.cli.ssh.connection import connected

        say("connecting")
        async with connected(host, self.access) as connection:
            say("ending" if self.now else "draining")
            done = await connection.call("stop", now=self.now, purge=self.purge)
        return [word for word in ("stopped", "purged") if done[word]]

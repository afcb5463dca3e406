"""`oobleck down`: end the agents on the hosts of a file, by ssh."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oobleck.cli.ssh.hosts import Host, read_hosts
from oobleck.cli.ssh.options import hosts_argument, ssh_options

if TYPE_CHECKING:
    from oobleck.cli.ssh.connection import Access


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
    from oobleck.cli.ssh.connection import Access
    from oobleck.cli.ssh.report import exit_code, on_each

    access = Access(identity=identity, known_hosts=known_hosts, python=python, directory=directory)
    ending = _Ending(access=access, now=now, purge=purge)
    return exit_code(asyncio.run(on_each(hosts, ending.down, parallel=parallel, as_json=as_json)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    access: "Access"
    now: bool
    purge: bool

    async def down(self, host: Host) -> list[str]:
        """Stop the host's agent and, if asked, remove its folder; return what was done.

        Raise HostFailed.
        """
        from oobleck.cli.ssh.connection import connected

        async with connected(host, self.access) as there:
            done = await there.call("stop", now=self.now, purge=self.purge)
        return [word for word in ("stopped", "purged") if done[word]]

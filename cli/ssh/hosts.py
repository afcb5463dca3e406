"""HOSTS.txt, the machines of a cluster, one per line; and options of commands that reach them.

Pure, except for reading the file; loads nothing of ssh.

    [user@]host[:port] [name=NAME] [workers=G] [device=cpu|cuda] [gpus=GPU,...] [rack=NAME]
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from oobleck.cli.options import F, json_option
from oobleck.core.ids import check_name, check_rack, nearest_name
from oobleck.host.command import USAGE, CommandFailed, nearest
from oobleck.host.system.files import read_regular

_MOST_BYTES = 1 << 20
_TARGET = re.compile(
    r"((?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<address>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_FORM = "write [user@]host[:port], an IPv6 address in brackets"
_KEYS = ("name", "workers", "device", "gpus", "rack")
_MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    line: int
    #: Empty: as in ssh's configuration, or the operator's own name.
    user: str
    #: Without brackets.
    address: str
    #: None: as in ssh's configuration, or 22.
    port: int | None
    #: Name of the node.
    name: str
    #: Options of its agent besides the master, its name and its credentials.
    agent_options: tuple[str, ...] = ()

    def __str__(self) -> str:
        user = f"{self.user}@" if self.user else ""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{user}{address}" + (f":{self.port}" if self.port is not None else "")


def read_hosts(path: Path) -> list[Host]:
    """Read a file of hosts. Raise CommandFailed with the line and the fix."""
    try:
        text = read_regular(path, _MOST_BYTES).decode()
    except OSError as error:
        raise CommandFailed(f"{path}: {error.strerror}; name a file of hosts", USAGE) from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{path}: is not UTF-8 text", USAGE) from error
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise CommandFailed(f"{path}: {error}", USAGE) from error


def parse_hosts(text: str) -> list[Host]:
    """Parse the text of a file of hosts. Raise ValueError with the line and the fix."""
    found: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _parse(number, words)
            for other in found:
                _check_apart(host, other)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        found.append(host)
    if not found:
        raise ValueError(f"names no host; {_FORM}, one per line")
    return found


def _parse(number: int, words: list[str]) -> Host:
    match = _TARGET.fullmatch(words[0])
    if match is None or not 0 < int(match["port"] or 22) < 65536:
        raise ValueError(f"{words[0]!r} is not a host; {_FORM}")
    given: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key in _KEYS and not value:
            raise ValueError(f"{word!r} has no value; write {key}=VALUE, or leave it out")
        if not equals or key not in _KEYS:
            near = nearest(key, _KEYS)
            hint = f"did you mean {near}=?" if near else f"known keys are {', '.join(_KEYS)}"
            raise ValueError(f"{word!r} is not a known KEY=VALUE; {hint}")
        if key in given:
            raise ValueError(f"{key} is given twice")
        given[key] = value
    address = match["address"].strip("[]")
    name = given.get("name", nearest_name(address))
    return Host(
        line=number,
        user=match["user"] or "",
        address=address,
        port=int(match["port"]) if match["port"] else None,
        name=check_name(name, "node"),
        agent_options=tuple(_agent_options(given)),
    )


def _agent_options(given: dict[str, str]) -> Iterator[str]:
    """Yield the agent's options from KEY=VALUE pairs. Raise ValueError."""
    if (workers := given.get("workers")) is not None:
        if not workers.isascii() or not workers.isdigit():
            raise ValueError(f"workers={workers}: is not a number; give 1 to {_MOST_WORKERS}")
        if not 1 <= int(workers) <= _MOST_WORKERS:
            raise ValueError(f"workers={workers}: a node has 1 to {_MOST_WORKERS}")
        yield from ("--workers", workers)
    device = given.get("device", "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: give cpu or cuda")
    if "gpus" in given and device != "cuda":
        raise ValueError(f"gpus={given['gpus']}: requires workers on GPUs; give device=cuda too")
    if "device" in given:
        yield from ("--device", device)
    if "gpus" in given:
        yield from ("--gpus", given["gpus"])
    if "rack" in given:
        yield from ("--rack", check_rack(given["rack"]))


def _check_apart(host: Host, other: Host) -> None:
    if host.name == other.name:
        raise ValueError(f"line {other.line} is named {host.name} too; give one another name=")
    if (host.address, host.port) == (other.address, other.port):
        raise ValueError(f"{host} is on line {other.line} too; a host has one agent")


# ---- access to hosts


KNOWN_HOSTS = (Path("~/.ssh/known_hosts"), Path("/etc/ssh/ssh_known_hosts"))


class HostFailed(Exception):
    """Failure of a request on one host; the text gives the reason and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access to hosts: how to reach them, and where Oobleck is on them."""

    #: Private key; None: the operator's default ones, and those in the ssh-agent.
    identity: Path | None
    #: None: the operator's and the system's.
    known_hosts: Path | None
    python: str
    #: Empty: the default, which differs for root.
    directory: str = ""
    #: User that runs agents if root logs in; empty: `oobleck`.
    run_as: str = ""

    @property
    def key_files(self) -> list[str]:
        paths = KNOWN_HOSTS if self.known_hosts is None else (self.known_hosts,)
        return [str(path.expanduser()) for path in paths if path.expanduser().is_file()]


# ---- options


def hosts_argument(function: F) -> F:
    return click.argument(
        "file", metavar="HOSTS.txt", type=click.Path(exists=True, dir_okay=False, path_type=Path)
    )(function)


def login_options(function: F) -> F:
    """Add the options `identity`, `known_hosts` and `python`."""
    key_file = click.Path(exists=True, dir_okay=False, path_type=Path)
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--identity",
            type=key_file,
            metavar="FILE",
            help="Private key for ssh.  [default: the ssh-agent's, and ~/.ssh/id_*]",
        ),
        click.option(
            "--known-hosts",
            type=key_file,
            metavar="FILE",
            help="Host keys, which are always checked.  [default: ~/.ssh/known_hosts and "
            "/etc/ssh/ssh_known_hosts]",
        ),
        click.option(
            "--python",
            default="python3",
            show_default=True,
            metavar="PROGRAM",
            help="Python 3.11 or newer on the hosts.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def ssh_options(function: F) -> F:
    """Add the options of `login_options`, and `directory`, `parallel`, `as_json`."""
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--directory",
            default="",
            metavar="DIR",
            help="Folder for all files on a host.  [default: ~/.oobleck/up; if root logs "
            "in, /opt/oobleck-up]",
        ),
        click.option(
            "--parallel",
            type=click.IntRange(1, 1000),
            default=32,
            show_default=True,
            metavar="N",
            help="How many hosts at a time.",
        ),
        json_option("One JSON object: hosts, each with what was done or the problem; and seconds."),
    ]
    for option in reversed(options):
        function = option(function)
    return login_options(function)

"""HOSTS.txt: the machines of a cluster, one per line.

Pure, except for reading the file; knows no ssh.

    [user@]host[:port] [name=NAME] [workers=G] [device=cpu|cuda] [gpus=GPU,...]
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oobleck.cli.options import USAGE
from oobleck.core.ids import check_name, nearest_name
from oobleck.host.command import CommandFailed, nearest
from oobleck.host.system.files import read_regular

_MOST_BYTES = 1 << 20
_TARGET = re.compile(
    r"((?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<address>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_FORM = "write [user@]host[:port], an IPv6 address in brackets"
_KEYS = ("name", "workers", "device", "gpus")
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
        if not (equals and value and key in _KEYS):
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


def _check_apart(host: Host, other: Host) -> None:
    if host.name == other.name:
        raise ValueError(f"line {other.line} is named {host.name} too; give one another name=")
    if (host.address, host.port) == (other.address, other.port):
        raise ValueError(f"{host} is on line {other.line} too; a host has one agent")

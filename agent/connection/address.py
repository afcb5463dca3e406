"""Choice of the address by which other hosts reach this host's workers."""

import socket
from collections.abc import Sequence
from contextlib import suppress

from oobleck.host.address import split_address


def local_address(masters: Sequence[str]) -> str:
    """Return the address of this host that packets to the first of the masters leave from, or to
    the next where that one has no way. Sends nothing. Raises OSError."""
    for master in masters[:-1]:
        with suppress(OSError):
            return _source(master)
    return _source(masters[-1])


def _source(master: str) -> str:
    host, port = split_address(master)
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def check_own_address(address: str) -> None:
    """Raise ValueError if workers could not serve on `address`, or others not reach them there."""
    fix = "give an address of this host that other nodes reach, or leave the flag out"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[
            0
        ]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--address {address}: does not resolve; {fix}") from error
    if target[0] in ("0.0.0.0", "::"):
        raise ValueError(f"--address {address}: nobody can connect to it; {fix}")
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(
            f"--address {address}: no worker can listen there ({reason}); {fix}"
        ) from error

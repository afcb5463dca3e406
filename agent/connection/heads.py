"""Addresses: where the cluster's heads may be, which one to call, and this host's own.

Addresses of --master come first, then those that a head has sent, stored beside the credentials.
Every head shows a certificate of the one authority, so a wrong address costs only time. A call in
the clear may not leave this host, so without credentials no addresses are learnt. Must not know the
calls to a head.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from oobleck.host.address import MOST_ADDRESSES, split_address, split_addresses
from oobleck.host.security.credentials import write_private
from oobleck.host.system.files import read_regular

#: Time in which a host accepts a connection.
ANSWER_S = 1.0
_FILE = "heads"
_MOST_BYTES = 16 << 10


def local_address(masters: Sequence[str]) -> str:
    """Return the address by which packets to the first reachable master leave. Raises OSError."""
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


logger = logging.getLogger(__name__)


class Heads:
    def __init__(self, given: Sequence[str], folder: Path | None) -> None:
        """Start at the operator's addresses. `folder`: the credentials', if there are any."""
        self._given = tuple(given)
        self._folder = folder
        self._told = _stored(folder) if folder is not None else ()
        #: Address in use.
        self.current = self._given[0]

    def __str__(self) -> str:
        return ", ".join(self.addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Known addresses, in the order in which they are tried."""
        return tuple(dict.fromkeys((*self._given, *self._told)))[:MOST_ADDRESSES]

    def learn(self, sent: Sequence[str]) -> None:
        """Store the addresses of all heads that a head has sent, if any."""
        if self._folder is None or not sent or tuple(sent) == self._told:
            return
        self._told = tuple(sent)
        try:
            write_private(self._folder / _FILE, "".join(f"{one}\n" for one in sent).encode())
        except OSError as error:  # then the next start knows only those of --master
            logger.warning("addresses of heads not stored", extra={"reason": error.strerror})

    async def seek(self, *, pass_over: bool) -> bool:
        """Make the first address current that accepts a connection, and return whether one does.
        Try the current one first; with `pass_over`, last. A single address is not tried."""
        known = self.addresses
        if len(known) == 1:
            self.current = known[0]
            return True
        first = known.index(self.current) if self.current in known else 0
        first += pass_over
        for address in (*known[first:], *known[:first]):
            if await _takes_connection(address):
                self.current = address
                return True
        return False


async def _takes_connection(address: str) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(*split_address(address))
    except (OSError, UnicodeError):  # a time-out too
        return False
    writer.transport.abort()
    return True


def _stored(folder: Path) -> tuple[str, ...]:
    try:
        text = read_regular(folder / _FILE, _MOST_BYTES).decode()
        return tuple(split_addresses(",".join(text.split())))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        logger.warning("stored addresses of heads passed over", extra={"reason": str(error)})
        return ()

"""A master's address and what to show there: whoever calls one decides here whether that is safe.

Without credentials a call is in the clear and anybody's, so it may not leave this host. A master
that the caller's own user runs here says itself where its operator's are. Must not know gRPC.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from oobleck.host.address import leaves_host, pinned, stays_on_host
from oobleck.host.ipc import own_master
from oobleck.host.security.credentials import Credentials, read_credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    #: HOST:PORT
    address: str
    #: None: in the clear.
    credentials: Credentials | None = None

    def __str__(self) -> str:
        return self.address


def check_insecure(flag: str, address: str) -> None:
    """Raises ValueError if a call or a service in the clear at `address` could leave this host;
    `flag` is what asks for it."""
    if not stays_on_host(address):
        raise ValueError(
            f"{flag}: {address} is no address of this host, and in the clear anybody in the "
            "network could command the cluster; use credentials instead"
        )


def choose_endpoint(address: str, credentials: Path | None, *, insecure: bool) -> Endpoint:
    """Return the master at `address` with what to show there: `credentials`, else those of the
    operator if the master is of this process's user. Raises ValueError with the flag and the fix.
    """
    if insecure:
        check_insecure("--insecure", address)
        return Endpoint(address=pinned(address))
    if credentials is not None:
        try:
            return Endpoint(address=address, credentials=read_credentials(credentials))
        except ValueError as error:
            raise ValueError(f"--credentials: {error}") from error
    leaves = leaves_host(address)
    address = address if leaves else pinned(address)
    own = own_master.find(address)
    if own is not None and os.path.exists(own.operator):
        try:
            return Endpoint(address=address, credentials=read_credentials(own.operator))
        except ValueError as error:
            raise ValueError(
                f"--master {address}: runs as you, but its operator's credentials cannot be used: "
                f"{error}"
            ) from error
    if leaves:
        raise ValueError(
            f"--master {address}: is not on this host, so the call needs credentials; name their "
            "folder with --credentials or OOBLECK_CREDENTIALS ('oobleck pki init' makes the first "
            "operator's, 'oobleck pki join' makes others from a token)"
        )
    return Endpoint(address=address)

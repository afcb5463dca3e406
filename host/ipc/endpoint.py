"""Address of a master and the credentials to show there; decides whether a call is safe.

Without credentials a call is in the clear and readable by anyone, so it may not leave this host. A
master that the caller's own user runs here reports the folder of its operator's credentials. Must
not know gRPC.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from oobleck.host.address import leaves_host, pinned, split_addresses, stays_on_host
from oobleck.host.ipc import own_master
from oobleck.host.security.credentials import Credentials, read_credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    #: HOST:PORT
    address: str
    #: None: in the clear.
    credentials: Credentials | None = None
    #: Further addresses where a head of the cluster may be.
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return all addresses, as --master takes them."""
        return ",".join(self.addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses in the order of trying."""
        return (self.address, *self.others)


def endpoint_at(addresses: str, credentials: Credentials | None) -> Endpoint:
    """Return the endpoint of HOST:PORT,HOST:PORT,... Raises ValueError."""
    address, *others = split_addresses(addresses)
    return Endpoint(address=address, credentials=credentials, others=tuple(others))


def check_insecure(flag: str, address: str) -> None:
    """Raise ValueError if a call or a service in the clear at `address` could leave this host;
    `flag` is the option that asks for it."""
    if not stays_on_host(address):
        raise ValueError(
            f"{flag}: {address} is not an address of this host, and in the clear anybody in the "
            "network could command the cluster; use credentials instead"
        )


def choose_endpoint(addresses: str, credentials: Path | None, *, insecure: bool) -> Endpoint:
    """Return the master at `addresses` (HOST:PORT, or several separated by commas) with the
    credentials for it.

    They are `credentials`, else those of the operator if one of these masters is of this process's
    user. Raises ValueError with the flag and the fix.
    """
    each = split_addresses(addresses)
    if insecure:
        for address in each:
            check_insecure("--insecure", address)
        return endpoint_at(",".join(map(pinned, each)), None)
    if credentials is not None:
        try:
            return endpoint_at(addresses, read_credentials(credentials))
        except ValueError as error:
            raise ValueError(f"--credentials: {error}") from error
    away = [address for address in each if leaves_host(address)]
    each = [address if address in away else pinned(address) for address in each]
    for address in each:
        own = own_master.find(address)
        if own is not None and os.path.exists(own.operator):
            try:
                return endpoint_at(",".join(each), read_credentials(own.operator))
            except ValueError as error:
                raise ValueError(
                    f"--master {address}: runs as you, but its operator's credentials cannot be "
                    f"used: {error}"
                ) from error
    if away:
        raise ValueError(
            f"--master {away[0]}: is not on this host, so the call needs credentials; name their "
            "folder with --credentials or OOBLECK_CREDENTIALS ('oobleck pki init' makes the first "
            "operator's, 'oobleck pki join' makes others from a token)"
        )
    return endpoint_at(",".join(each), None)

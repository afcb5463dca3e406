"""This host's name, HOST:PORT as users write it, and whether it stays on this host. Must not know
who listens there."""

import ipaddress
import re
import socket

from oobleck.host.display import inline

#: A name or an IPv4 address; an IPv6 address needs its brackets, or its end is not to be seen.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Za-z:.%]+\]):(?P<port>[0-9]{1,5})")

#: Of the heads of one cluster.
MOST_ADDRESSES = 16


def own_hostname() -> str:
    """As others are told it: the kernel takes any bytes for it, a message only text."""
    return inline(socket.gethostname())


def split_address(text: str) -> tuple[str, int]:
    """Host (without brackets) and port; raises ValueError if `text` is anything else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:4600")
    return match["host"].strip("[]"), int(match["port"])


def split_addresses(text: str) -> list[str]:
    """Return each of the addresses in HOST:PORT,HOST:PORT,... once. Raises ValueError."""
    found = list(dict.fromkeys(text.split(",")))
    for address in found:
        split_address(address)
    if len(found) > MOST_ADDRESSES:
        raise ValueError(f"{len(found)} addresses are more than {MOST_ADDRESSES}")
    return found


def leaves_host(address: str) -> bool:
    """Whether HOST:PORT resolves to anything but loopback addresses; what does not resolve leads
    nowhere. Raises ValueError if it is no address."""
    return not all(map(_is_loopback, addresses(address)))


def stays_on_host(address: str) -> bool:
    """Whether HOST:PORT resolves to loopback addresses alone. What does not resolve now may later,
    as after a boot without a name service. Raises ValueError if it is no address."""
    found = addresses(address)
    return bool(found) and all(map(_is_loopback, found))


def own_address(host: str, port: int) -> str:
    """HOST:PORT by which this host reaches what listens at `host`, which may be all addresses."""
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"{everywhere.get(host, host)}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host, by its number or as localhost, is never reached from another one. No name is
    resolved."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


def pinned(address: str) -> str:
    """HOST:PORT by number, for an address that stays on this host: who answers for a name may
    answer something else later. `localhost` is always this host; what does not resolve stays."""
    host, port = split_address(address)
    found = sorted(addresses(address), key=lambda number: ":" in number)
    if host == "localhost" or not found:
        return address
    return joined(found[0], port)


def joined(host: str, port: int) -> str:
    """HOST:PORT of a host without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_number(host: str) -> bool:
    """Whether it is an address, without brackets, and no name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def addresses(address: str) -> list[str]:
    """Return the numbers that HOST:PORT resolves to, each once; none where it does not. Raises
    ValueError if it is no address."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in found))


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback

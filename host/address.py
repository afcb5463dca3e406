"""Addresses: this host's name, parsing HOST:PORT, and whether it stays on this host.

Must not know what listens there.
"""

import ipaddress
import re
import socket

from oobleck.host.display import inline

#: A name or an IPv4 address. An IPv6 address needs its brackets, which mark its end.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Za-z:.%]+\]):(?P<port>[0-9]{1,5})")

#: Most addresses of the heads of one cluster.
MOST_ADDRESSES = 16


def own_hostname() -> str:
    """Return this host's name as valid text, whatever bytes the kernel has."""
    return inline(socket.gethostname())


def split_address(text: str) -> tuple[str, int]:
    """Split `text` into host (without brackets) and port. Raises ValueError if it is not
    HOST:PORT."""
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
    """Return whether HOST:PORT resolves to any address but loopback ones. Raises ValueError."""
    return not all(map(_is_loopback, addresses(address)))


def stays_on_host(address: str) -> bool:
    """Return whether HOST:PORT resolves to loopback addresses only. False for a name that does not
    resolve now, since it may resolve to another host later. Raises ValueError."""
    found = addresses(address)
    return bool(found) and all(map(_is_loopback, found))


def own_address(host: str, port: int) -> str:
    """Return the HOST:PORT by which this host reaches a listener at `host`."""
    everywhere = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"{everywhere.get(host, host)}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback IP address. Resolves no other name."""
    try:
        return _is_loopback(host)
    except ValueError:
        return host == "localhost"


def pinned(address: str) -> str:
    """Replace the name in this host's HOST:PORT by its IP address, since the name may resolve to
    another one later. Keep `localhost`, and a name that does not resolve."""
    host, port = split_address(address)
    found = sorted(addresses(address), key=lambda number: ":" in number)
    if host == "localhost" or not found:
        return address
    return joined(found[0], port)


def joined(host: str, port: int) -> str:
    """Join a host without brackets and a port to HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_number(host: str) -> bool:
    """Return whether `host` is an IP address, without brackets, rather than a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def without_port(host: str) -> str:
    """Return the host, without brackets, of HOST or HOST:PORT, as in a header of HTTP."""
    return host if is_number(host) else re.sub(r":[0-9]*$", "", host).strip("[]")


def addresses(address: str) -> list[str]:
    """Return the IP addresses that HOST:PORT resolves to, if any. Raises ValueError."""
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

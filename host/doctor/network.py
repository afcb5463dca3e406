"""Names, interfaces and routes of this host, and their faults that hinder workers.

Reading is separate from concluding, so that the latter is a pure function.
"""

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from oobleck.core.orders import About, Finding
from oobleck.host.address import is_loopback, is_number, own_hostname, split_address

#: Fewer ports than this are too few.
_FEW_PORTS = 4096
#: Interfaces that NCCL takes only where there is nothing else; `lo` reaches only this host.
_LAST = ("docker", "lo")
_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_NUMBERS = re.compile(r"(\d+)\s+(\d+)")
_SYS = Path("/sys")


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    addresses: tuple[str, ...]
    #: Bytes of the largest packet.
    mtu: int
    up: bool = True


class Network(msgspec.Struct, frozen=True, kw_only=True):
    hostname: str
    #: Addresses that the host's own name resolves to here; none if it does not resolve.
    named: tuple[str, ...]
    #: Addresses of the name of the master's host; None: --master has a number.
    master: tuple[str, ...] | None = None
    #: In the kernel's order.
    interfaces: tuple[Interface, ...]
    #: By address of another node: this host's address that packets to it leave from; empty: no
    #: route.
    sources: Mapping[str, str] = {}
    #: InfiniBand and RoCE: states of ports by adapter and number.
    adapters: Mapping[str, str] = {}
    #: Number of ports that the kernel may choose.
    ports: int = 0

    def holding(self, address: str) -> Interface | None:
        """Return the interface that has the address."""
        return next((one for one in self.interfaces if address in one.addresses), None)


def read(about: About, peers: Sequence[str], root: Path = _SYS) -> Network:
    states = psutil.net_if_stats()
    interfaces = [
        Interface(
            name=name,
            addresses=tuple(one.address.partition("%")[0] for one in addresses if _is_ip(one)),
            mtu=states[name].mtu if name in states else 0,
            up=name not in states or states[name].isup,
        )
        for name, addresses in psutil.net_if_addrs().items()
    ]
    hostname = own_hostname()
    host = split_address(about.master)[0] if about.master else ""
    return Network(
        hostname=hostname,
        named=_resolved(hostname),
        master=_resolved(host) if host and not is_number(host) else None,
        interfaces=tuple(interfaces),
        sources={peer: _source(peer) for peer in peers},
        adapters=_adapters(root),
        ports=_ports(),
    )


def _is_ip(address: object) -> bool:
    return getattr(address, "family", None) in (socket.AF_INET, socket.AF_INET6)


def _resolved(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(target[0]).partition("%")[0] for *_, target in found))


def _source(peer: str) -> str:
    """Return the source address of packets to `peer`, without sending any; empty: there is no
    route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def _adapters(root: Path) -> dict[str, str]:
    found = {}
    for port in sorted((root / "class/infiniband").glob("*/ports/*/state")):
        try:
            state = port.read_text(errors="replace").partition(":")[2].strip()
        except OSError:
            state = "unknown"
        found[f"{port.parts[-4]}:{port.parts[-2]}"] = state[:64]
    return found


def _ports() -> int:
    try:
        match = _NUMBERS.match(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text())
    except OSError:
        match = None
    return int(match[2]) - int(match[1]) + 1 if match else 0


# ---- conclusions


def conclude(found: Network, about: About) -> Iterator[Finding]:
    yield from _of_names(found, about)
    yield from _of_address(found, about)
    if about.address and not is_loopback(about.address):
        yield from _of_routes(found, about)
        yield from _of_choice(found, about)
    for port, state in found.adapters.items():
        if state != "ACTIVE":
            what = f"port {port} of an adapter is {state}"
            fix = "check its cable, switch and subnet manager (ibstat), or leave it out with --hca"
            yield Finding(check="adapters", level="warn", what=what, fix=fix)
    if 0 < found.ports < _FEW_PORTS:
        what = (
            f"the kernel may choose among {found.ports} ports, and each worker and link takes one"
        )
        fix = "set net.ipv4.ip_local_port_range to 32768 60999 (sysctl)"
        yield Finding(check="ports", level="warn", what=what, fix=fix)


def _of_names(found: Network, about: About) -> Iterator[Finding]:
    name = found.hostname
    address = about.address or "its address"
    fix = f"have {address} and {name} in one line of /etc/hosts, or of the name service"
    loops = [each for each in found.named if _loops(each)]
    if not found.named:
        what = f"the host's own name, {name}, does not resolve"
        yield Finding(check="names", level="warn", what=what, fix=fix)
    elif about.address and not is_loopback(about.address) and loops == list(found.named):
        what = (
            f"the host's own name, {name}, resolves to {', '.join(loops)}, where no other host "
            "reaches it: programs that announce their host's name announce that"
        )
        yield Finding(check="names", level="warn", what=what, fix=f"{fix}, without {loops[0]}")
    else:
        what = f"{name} resolves to {', '.join(found.named)}"
        yield Finding(check="names", level="pass", what=what)
    if found.master == ():
        what = f"the name of the master's host, in {about.master}, no longer resolves"
        fix = "repair the name service, or give --master by number: a new connection needs it"
        yield Finding(check="names", level="fail", what=what, fix=fix)


def _loops(address: str) -> bool:
    return is_number(address) and is_loopback(address)


def _of_address(found: Network, about: About) -> Iterator[Finding]:
    if not about.address:
        return
    here = found.holding(about.address)
    if here is None:
        what = f"no interface has the address {about.address} by which others are to reach it"
        fix = "start the agent with an --address or --interface of this host"
        yield Finding(check="address", level="fail", what=what, fix=fix)
    elif not here.up:
        what = f"{here.name}, which has the address {about.address}, is down"
        fix = f"bring it up (ip link set {here.name} up), or give another --interface"
        yield Finding(check="address", level="fail", what=what, fix=fix)
    else:
        what = f"{about.address} is on {here.name}, with packets of {here.mtu} bytes"
        figures = {"mtu": float(here.mtu)}
        yield Finding(check="address", level="pass", what=what, figures=figures)


def _of_routes(found: Network, about: About) -> Iterator[Finding]:
    others: dict[str, list[str]] = {}
    for peer, source in found.sources.items():
        if found.holding(peer) is None and source != about.address:
            others.setdefault(source, []).append(peer)
    for source, peers in others.items():
        to = ", ".join(peers[:4]) + (f" and {len(peers) - 4} more" if len(peers) > 4 else "")
        if not source:
            fix = "give the host a route to there (ip route)"
            yield Finding(check="routes", level="fail", what=f"there is no route to {to}", fix=fix)
            continue
        by = found.holding(source)
        what = (
            f"packets to {to} leave by {by.name if by else 'another interface'} ({source}), and "
            f"others reach this node at {about.address}"
        )
        fix = (
            f"start the agent with --address {source} if that is the fast network, else give the "
            "host a route to there by the other interface (ip route)"
        )
        yield Finding(check="routes", level="warn", what=what, fix=fix)
    if found.sources and not others:
        what = f"packets to the other nodes leave from {about.address}"
        yield Finding(check="routes", level="pass", what=what)


def _of_choice(found: Network, about: About) -> Iterator[Finding]:
    """Check the interfaces that NCCL and Gloo are going to use."""
    here = found.holding(about.address)
    for variable in _VARIABLES:
        value = about.variables.get(variable, "")
        nccl = variable.startswith("NCCL")
        if here is None or not (value or (nccl and about.device == "cuda")):
            continue
        chosen = nccl_choice(value, found.interfaces) if nccl else tuple(value.split(","))
        setting = f"{variable}={value}" if value else f"without {variable}"
        library = "NCCL" if nccl else "Gloo"
        fix = f"unset {variable} and start the agent with --interface {here.name}"
        if not chosen or not {one.name for one in found.interfaces} & {*chosen}:
            what = f"{setting}: this host has no such interface, so {library} finds none"
            yield Finding(check="interface", level="fail", what=what, fix=fix)
        elif chosen != (here.name,):
            what = (
                f"{setting}: {library} uses {', '.join(chosen)}, and others reach this node at "
                f"{about.address} on {here.name}"
            )
            level = "warn" if here.name in chosen else "fail"
            yield Finding(check="interface", level=level, what=what, fix=fix)  # type: ignore[arg-type]
        else:
            what = f"{setting}: {library} uses {here.name}, which has {about.address}"
            yield Finding(check="interface", level="pass", what=what)


def nccl_choice(setting: str, interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Return the interfaces that NCCL uses. `setting`: the value of NCCL_SOCKET_IFNAME (NCCL's user
    guide, "Environment variables"); empty: it is not set.

    Its names are prefixes, or whole names after `=`; after `^` they are excluded. Without it NCCL
    prefers InfiniBand, and takes docker's interfaces and loopback only if there are no others.
    """
    up = [interface.name for interface in interfaces if interface.up and interface.addresses]
    if setting:
        exclude, rest = setting.startswith("^"), setting.removeprefix("^")
        exact, rest = rest.startswith("="), rest.removeprefix("=")
        words = tuple(word.partition(":")[0] for word in rest.split(",") if word)
        named = [n for n in up if (n in words if exact else n.startswith(words))]
        return tuple(n for n in up if n not in named) if exclude else tuple(named)
    fast = tuple(name for name in up if name.startswith("ib"))
    plain = tuple(name for name in up if not name.startswith(_LAST))
    return fast or plain or tuple(up)

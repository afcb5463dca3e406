"""A network of hosts on one machine: a namespace per host, and a router that all packets pass.

What is done to a link is done in the router, so neither end is told: no reset, no end of a stream,
no error of a local interface. This machine has an address there too, as the operator's. Needs root
and Linux; knows nothing of what runs on the hosts.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import count, product

from bench.support.scratch import is_over, own_name

#: Addresses reserved for tests of networks (RFC 2544).
_ADDRESSES = "198.18.{net}.{host}"
_NETS = 250
_OPERATOR = 250
_END_S = 10.0
#: Burst of a link: its bytes in this time, at least so many. If a busy kernel serves the queue
#: late, the link catches up by this much only. Packets of up to 64 KB that are larger are split,
#: which takes ten times as much processor time.
_BURST_S, _LEAST_BURST_BYTES = 0.0015, 16 << 10
#: Counter of the networks of this process.
_COUNT = count(1)


class NetworkError(RuntimeError):
    """Error of the kernel, which refused a part of the network."""


def unusable() -> str:
    """Return why this machine cannot have such networks; empty: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool!r} command"
    name = f"{own_name()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no network namespaces: {made.stderr.strip()}"
    try:
        rule = ("rule", "add", "from", "198.18.0.1", "to", "198.18.0.2", "blackhole")
        probe = subprocess.run(["ip", "-n", name, *rule], capture_output=True, text=True)
        return f"no routing rules: {probe.stderr.strip()}" if probe.returncode else ""
    finally:
        _run("ip", "netns", "del", name)


class Network:
    """Hosts connected by a router; a context manager that leaves nothing behind."""

    def __init__(self, hosts: Sequence[str], bytes_per_s: int | None = None) -> None:
        """Build the network. `bytes_per_s`: limit of every host's sends, and of its receives; None:
        no limit."""
        self._bytes_per_s = bytes_per_s
        self._hosts: list[str] = []
        self._blocked: set[tuple[str, str]] = set()
        remove_left_behind()
        self._spaces = f"{own_name()}-net{next(_COUNT)}"
        self._router = f"{self._spaces}-router"
        try:
            self._net = self._claim()
            self._build()
            for host in hosts:
                self.add(host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self) -> int:
        """Make the router; return a number that no other network on this machine has."""
        _run("ip", "netns", "add", self._router)
        for net in range(1, _NETS):
            link = ("ip", "link", "add", f"ob{net}op", "type", "veth", "peer", f"ob{net}far")
            if _run(*link, "netns", self._router, check=False):
                return net
        raise NetworkError("no free network: see 'ip link'")

    def _build(self) -> None:
        link = f"ob{self._net}op"
        far = f"ob{self._net}far"
        _run("ip", "addr", "add", f"{self.operator}/24", "dev", link)
        _run("ip", "link", "set", link, "up")
        self._in_router("link", "set", "lo", "up")
        self._in_router("link", "set", far, "up")
        self._in_router("route", "add", self.operator, "dev", far)
        # Drop packets to an absent host silently.
        self._in_router("route", "add", "blackhole", "default")
        inside = self._inside(self._router)
        _run(*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        # The router answers ARP for all hosts, so that each seems to be on the same link.
        _run(*inside, "sh", "-c", f"echo 1 > /proc/sys/net/ipv4/conf/{far}/proxy_arp")

    def add(self, host: str) -> None:
        """Add a host."""
        self._hosts.append(host)
        self._connect(host)

    def replace(self, host: str) -> None:
        """Replace the kernel state of a host without processes: it forgets its connections without
        closing them."""
        self._in_router("link", "del", self._port(host))
        _run("ip", "netns", "del", self._space(host))
        self._connect(host)

    def _connect(self, host: str) -> None:
        space, port = self._space(host), self._port(host)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", "eth0", "netns", space, *("type", "veth"), *("peer", port),
             "netns", self._router)  # fmt: skip
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        self._in_router("link", "set", port, "up")
        self._in_router("route", "add", self.address(host), "dev", port)
        proxy = f"echo 1 > /proc/sys/net/ipv4/conf/{port}/proxy_arp"
        _run(*self._inside(self._router), "sh", "-c", proxy)
        self._shape(host, self._bytes_per_s)

    # ---- who is where

    @property
    def operator(self) -> str:
        """Address of this machine, outside of all hosts."""
        return _ADDRESSES.format(net=self._net, host=_OPERATOR)

    def address(self, host: str) -> str:
        return _ADDRESSES.format(net=self._net, host=self._hosts.index(host) + 1)

    def on(self, host: str) -> list[str]:
        """Return the beginning of a command that runs on the host, in the same process."""
        return self._inside(self._space(host))

    def _space(self, host: str) -> str:
        return f"{self._spaces}-{host}"

    def _port(self, host: str) -> str:
        return f"ob{self._net}p{self._hosts.index(host) + 1}"

    @staticmethod
    def _inside(space: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{space}"]

    # ---- trouble

    def block(self, sources: Sequence[str], targets: Sequence[str]) -> None:
        """Lose every packet from a source to a target, and none on the way back."""
        for source, target in product(sources, targets):
            if source != target and (source, target) not in self._blocked:
                self._in_router("rule", "add", *self._way(source, target))
                self._blocked.add((source, target))

    def part(self, some: Sequence[str], others: Sequence[str]) -> None:
        """Lose every packet between the two groups, both ways."""
        self.block(some, others)
        self.block(others, some)

    def unplug(self, host: str) -> None:
        """Take the host's link down at the router's end."""
        self._in_router("link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        port = self._port(host)
        self._in_router("link", "set", port, "up")
        self._in_router("route", "replace", self.address(host), "dev", port)

    def slow(self, host: str, bytes_per_s: int) -> None:
        """Let the host receive, and send, only so much."""
        self._shape(host, bytes_per_s)

    def _shape(self, host: str, bytes_per_s: int | None) -> None:
        for space, device in ((self._router, self._port(host)), (self._space(host), "eth0")):
            queue = ("tc", "-n", space, "qdisc", "replace", "dev", device, "root")
            if bytes_per_s is None:
                _run(*queue, "noqueue")
            else:
                # One queue for all: what waits in it for long would be a silent host to others.
                burst = max(_LEAST_BURST_BYTES, int(bytes_per_s * _BURST_S))
                rate = ("rate", f"{8 * bytes_per_s}bit", "burst", f"{burst}", "latency", "500ms")
                _run(*queue, "tbf", *rate)

    def route(self, *command: str) -> None:
        """Change the router's rules and routes by an `ip` command; `heal` does not know of it."""
        self._in_router(*command)

    def port(self, host: str) -> str:
        """The router's end of the host's link."""
        return self._port(host)

    def heal(self) -> None:
        """Undo all trouble."""
        for source, target in sorted(self._blocked):
            self._in_router("rule", "del", *self._way(source, target))
        self._blocked.clear()
        for host in self._hosts:
            self.plug(host)
            self._shape(host, self._bytes_per_s)

    def _way(self, source: str, target: str) -> tuple[str, ...]:
        return ("from", self.address(source), "to", self.address(target), "blackhole")

    def _in_router(self, *command: str) -> None:
        _run("ip", "-n", self._router, *command)

    # ---- the end

    def processes(self) -> list[int]:
        """All that runs on a host."""
        return [pid for host in self._hosts for pid in _processes(self._space(host))]

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove them; the links go with them."""
        _remove([*map(self._space, self._hosts), self._router])


def remove_left_behind() -> None:
    """The hosts of runs that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    _remove([name for name, *_ in map(str.split, listed.splitlines()) if is_over(name)])


def _remove(spaces: Sequence[str]) -> None:
    deadline = time.monotonic() + _END_S
    while (left := [p for s in spaces for p in _processes(s)]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for space in spaces:
        _run("ip", "netns", "del", space, check=False)


def _processes(space: str) -> list[int]:
    pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    return [int(pid) for pid in pids.stdout.split()]


def _run(*command: str, check: bool = True) -> bool:
    """Whether it worked."""
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.returncode == 0

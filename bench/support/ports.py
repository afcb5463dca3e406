"""Ports for servers that stop and come back at the same address."""

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def choose_address() -> str:
    """Return 127.0.0.1:PORT with a port that the kernel gives nobody while this process runs.

    The kernel gives ports of its ephemeral range to every listener that asks for port 0 and to
    every outgoing connection, so such a port may be gone by the time a server comes back to it.
    This one is outside of that range, and an abstract socket, which ends with this process however
    that ends, tells other callers in the network namespace that it is taken. Raises RuntimeError
    where the range leaves no ports.
    """
    first, last = map(int, _EPHEMERAL.read_text().split())
    ports = [port for port in range(10_000, 65_536) if not first <= port <= last]
    chosen = random.SystemRandom()  # tests seed the module's own generator
    for port in chosen.sample(ports, len(ports)):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0oobleck-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        mark.detach()  # open until this process ends
        return f"127.0.0.1:{port}"
    raise RuntimeError(f"net.ipv4.ip_local_port_range leaves no port free: {first} to {last}")

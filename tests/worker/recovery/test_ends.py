"""A process that ends right after it has left a generation frees its groups first.

An interpreter that ends while one of its daemon threads is in native code aborts the process, so
what frees groups later must not be one.
"""

import subprocess
import sys

#: Of three groups' members and their connections, less than there are.
SOCKETS = 3 * 2 * 2

LEAVES_AT_ONCE = """
import atexit, os
from concurrent.futures import ThreadPoolExecutor

from oobleck.worker.transport.rendezvous import RendezvousStore, StoreServer
from oobleck.worker.transport.gloo import GlooTransport
from oobleck.worker.runtime.waiting import Waits

SIZE, HOST = 3, "127.0.0.1"

def descriptors():
    return len(os.listdir("/proc/self/fd"))

servers = [StoreServer(HOST) for _ in range(SIZE)]

def connect(rank):
    waits = Waits()
    rendezvous = RendezvousStore(servers[0].endpoint, "ends", own=servers[rank], waits=waits)
    peers = set(range(SIZE)) - {rank}
    return GlooTransport(rendezvous, rank, SIZE, [(0, 1)], HOST, waits, peers=peers, meshed=True)

with ThreadPoolExecutor(SIZE) as pool:
    transports = list(pool.map(connect, range(SIZE)))
    in_use = descriptors()
    for transport in transports:
        transport.abort()
        transport.dispose()
    del transport, transports
atexit.register(lambda: print(in_use - descriptors()))
"""


def test_groups_are_freed_before_the_process_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_AT_ONCE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > SOCKETS, done.stderr

"""Cost of many connections without calls, to a master and to its real clients.

    python -m bench.idle_crowd [--connections 12000] [--seconds 15] [--say nothing|hello|garbage]

Starts a real `oobleck-master` with certificates. A process of its own keeps so many connections to
it, all from 127.0.0.2, and opens another for each that ends, while an operator on 127.0.0.1 calls.
"""

import argparse
import os
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from multiprocessing import get_context
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

from bench.master_scale import Master
from bench.support.scratch import run_folder
from oobleck.cli.client import MasterClient as Operator
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import read_credentials
from oobleck.host.system.process import allow_open_files

SOURCE = "127.0.0.2"
#: Wait after the crowd has gone: a handshake, and the time for which a source is refused.
_AFTER_S = 18.0
_CALL_S = 0.25


def words(kind: str) -> bytes:
    match kind:
        case "hello":  # the client's first message of TLS
            sent = ssl.MemoryBIO()
            context = ssl.create_default_context()
            context.set_alpn_protocols(["h2"])
            client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="master.oobleck")
            try:
                client.do_handshake()
            except ssl.SSLWantReadError:
                return sent.read()
            raise RuntimeError("a handshake without an answer")
        case "garbage":
            return os.urandom(64)
        case _:
            return b""


def crowd(port: int, count: int, seconds: float, greeting: bytes) -> None:
    allow_open_files()
    opened = let_in = ended = 0
    open_now: set[socket.socket] = set()
    end = time.monotonic() + seconds
    with DefaultSelector() as selector:
        while time.monotonic() < end:
            for _ in range(min(200, count - len(open_now))):
                one = socket.socket()
                one.setblocking(False)
                one.bind((SOURCE, 0))
                one.connect_ex(("127.0.0.1", port))
                selector.register(one, EVENT_READ | EVENT_WRITE)
                open_now.add(one)
                opened += 1
            for key, events in selector.select(0.01):
                found = key.fileobj
                assert isinstance(found, socket.socket)
                try:
                    if events & EVENT_WRITE:
                        let_in += 1
                        found.send(greeting)
                        selector.modify(found, EVENT_READ)
                        continue
                    over = not found.recv(65536)
                except OSError:
                    over = True
                if over:
                    selector.unregister(found)
                    found.close()
                    open_now.discard(found)
                    ended += 1
    print(f"crowd: {opened} connections begun, {let_in} let in, {ended} ended by the master")


def calls(endpoint: Endpoint, seconds: float) -> Iterator[float]:
    """Yield the seconds of an operator's calls, each on a new connection; infinity: it failed."""
    until = time.monotonic() + seconds
    while (begun := time.monotonic()) < until:
        try:
            with Operator(endpoint) as operator:
                operator.nodes()
            yield time.monotonic() - begun
        except CommandFailed as failed:
            print(f"  a call failed: {failed}")
            yield float("inf")
        time.sleep(_CALL_S)


def measure(master: Master, endpoint: Endpoint, seconds: float, when: str) -> None:
    before_s = master.processor_s()
    took = sorted(calls(endpoint, seconds))
    print(
        f"{when}: {master.memory}, {(master.processor_s() - before_s) / seconds:.2f} of a core; "
        f"{len(took)} calls, median {1e3 * statistics.median(took):.0f} ms, "
        f"longest {1e3 * took[-1]:.0f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, default=12_000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--say", choices=("nothing", "hello", "garbage"), default="nothing")
    arguments = parser.parse_args()
    with run_folder() as scratch:
        master = Master(scratch)
        try:
            operator = read_credentials(master.keys / "operator")
            endpoint = Endpoint(address=master.address, credentials=operator)
            measure(master, endpoint, 3.0, "before")
            port = int(master.address.rpartition(":")[2])
            crowd_arguments = (port, arguments.connections, arguments.seconds, words(arguments.say))
            attacking = get_context("spawn").Process(target=crowd, args=crowd_arguments)
            attacking.start()
            for part in range(3):
                measure(master, endpoint, arguments.seconds / 3, f"crowd, part {part + 1}")
            attacking.join()
            measure(master, endpoint, _AFTER_S, "after it")
        finally:
            master.kill()


if __name__ == "__main__":
    main()

"""How long a new link to a worker takes while strangers connect to its port.

    python -m bench.strangers [--rate 7000] [--source 127.0.0.2] [--stay 0.02] [--busy]

A process has the links of one worker and enters meeting after meeting; `--busy`: a thread of it
computes in Python meanwhile, as a model's own code may. Two others keep `--rate` connections a
second coming from `--source`, each of which stays for `--stay` seconds. A third meets the worker
anew each time, as a worker that takes the place of another does: it has no link yet, so the figure
is the time of a whole new link, from its call to the end of the meeting. The worker's processor
time says what the strangers cost it.
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

from oobleck.host.system.process import allow_open_files
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links

HOST = "127.0.0.1"
SECRET = b"s" * 32
_PROCESSES = 2
#: SO_LINGER: have the kernel forget a closed connection at once.
_NO_LINGER = struct.pack("ii", 1, 0)
_MOST_STAYING = 20_000
_GAP_S = 0.05
_TRIES = 10


def compute() -> None:
    while True:
        sum(range(1000))


def worker(orders: Connection, busy: bool) -> None:
    """Hold a meeting for each order; send the processor time so far."""
    links = Links(HOST, silence_s=60)
    if busy:
        threading.Thread(target=compute, daemon=True).start()
    orders.send(links.card.text)
    while (epoch := orders.recv()) is not None:
        links.favour(epoch, [links.card])  # as workers do, with the cards of the plan
        transport = LinkTransport(links, epoch, SECRET, 0, 2)
        orders.send(time.process_time())
        transport.meet(links.card, {1}, b"", lambda: None)
        orders.send(None)
    os._exit(0)


def strangers(
    card: Card, source: str, rate: float, stay_s: float, came: "Synchronized[int]"
) -> None:
    """Connect `rate` times a second until this process is ended."""
    allow_open_files()
    begun, count = time.monotonic(), 0
    staying: deque[tuple[float, socket.socket]] = deque()
    while True:
        now = time.monotonic()
        while count < (now - begun) * rate and len(staying) < _MOST_STAYING:
            one = socket.socket()
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            with contextlib.suppress(OSError):  # no port is free
                one.bind((source, 0))
                one.connect_ex((card.host, card.port))
            staying.append((now + stay_s, one))
            count += 1
        while staying and staying[0][0] < now:
            staying.popleft()[1].close()
        came.value = count
        time.sleep(0.001)


def measure(card: Card, orders: Connection, first: int, seconds: float, what: str) -> int:
    took: list[float] = []
    failed = 0
    epoch, until = first, time.monotonic() + seconds
    begun, spent_s, at_s = time.monotonic(), 0.0, 0.0
    while time.monotonic() < until or not took:
        orders.send(epoch)
        at_s = orders.recv()
        spent_s = spent_s or at_s
        links = Links(HOST, silence_s=60)
        transport = LinkTransport(links, epoch, SECRET, 1, 2)
        called = time.monotonic()
        for _ in range(_TRIES):
            try:
                transport.meet(card, {0}, b"", lambda: None)
                break
            except TransportError:  # unreachable: in a job its host would count as cut off
                failed += 1
                links.close()
                links = Links(HOST, silence_s=60)
                transport = LinkTransport(links, epoch, SECRET, 1, 2)
        took.append(time.monotonic() - called)
        orders.recv()
        transport.stand_down()
        links.close()
        epoch += 1
        time.sleep(_GAP_S)
    took.sort()
    share = (at_s - spent_s) / (time.monotonic() - begun)
    print(
        f"{what:16} {len(took):4} links, median {1e3 * statistics.median(took):7.1f} ms, "
        f"p95 {1e3 * took[int(len(took) * 0.95)]:7.1f} ms, longest {1e3 * took[-1]:7.1f} ms, "
        f"{failed} calls in vain; "
        f"the worker takes {share:.2f} of a core",
        flush=True,
    )
    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, default=7000.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--source", default="127.0.0.2")
    parser.add_argument("--stay", type=float, default=0.02)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    there = context.Process(target=worker, args=(theirs, options.busy), daemon=True)
    there.start()
    card = Card.read(orders.recv())
    epoch = measure(card, orders, 1, 3.0, "nobody")
    counts = [context.Value("q", 0) for _ in range(_PROCESSES)]
    crowd = [
        context.Process(
            target=strangers,
            args=(card, options.source, options.rate / _PROCESSES, options.stay, came),
            daemon=True,
        )
        for came in counts
    ]
    for one in crowd:
        one.start()
    while not all(came.value for came in counts):
        time.sleep(0.05)
    time.sleep(1.0)
    before, begun = sum(came.value for came in counts), time.monotonic()
    epoch = measure(card, orders, epoch, options.seconds, f"{options.source}")
    rate = (sum(came.value for came in counts) - before) / (time.monotonic() - begun)
    print(f"{'':16} {rate:.0f} strangers a second")
    for one in crowd:
        one.kill()
        one.join()
    measure(card, orders, epoch, 3.0, "after them")
    orders.send(None)
    there.join()


if __name__ == "__main__":
    main()

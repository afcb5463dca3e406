"""The store in which the workers of a generation meet before they can talk; one of them serves it.

Owns both ends of the store, and the arrival, from which all members go on together: to build
groups, or back because a newer generation is wanted. Must not know groups or plans.

A store's client may wait for ever for a stopped host, whatever its time-out: the kernel of that
host takes connections and requests, and nobody answers. So every call can be given up.
"""

import errno
import hmac
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from oobleck.planner.ids import Generation
from oobleck.worker.runtime.errors import Superseded, TransportError, Unreached, peers_may_fail
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.links.door import Card

T = TypeVar("T")

#: For the exchanges with a store, whose server is known to be up: this long only where a host is
#: busy with other things. Who dies or is superseded meanwhile releases the wait.
STORE_TIMEOUT = timedelta(seconds=30)
#: After its own time-out a call may take this much longer where the host does answer.
STORE_GRACE_S = 1.0
#: For the kernel of a host that is up, which answers a call however busy its processes are.
DIAL_LIMIT_S = 5.0
#: How long a wait for the others' arrival may last before it looks whether it is still wanted.
ARRIVAL_POLL = timedelta(milliseconds=50)

_GO, _CALLED_OFF = "go", "called off"


class StoreServer:
    """The store that this worker serves for its lifetime, so that any generation may meet in it."""

    def __init__(self, address: str) -> None:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listener.bind((address, 0))
        listener.listen(4096)
        port: int = listener.getsockname()[1]
        self.endpoint = f"{address}:{port}"
        self.store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )


class RendezvousStore:
    """The part of a store that one rendezvous uses. Every call ends: with the store's answer, or
    with TransportError when its host does not answer or `waits` is released."""

    def __init__(self, endpoint: str, prefix: str, *, own: StoreServer, waits: Waits) -> None:
        """In the `own` store, or in another worker's. Raises TransportError.

        Only the plan's workers know `prefix`. Anybody who reaches the store can read what is in it,
        so keys are derived from the prefix and do not reveal it.
        """
        self._waits = waits
        self._secret = prefix.encode()
        self._store: Store = own.store
        #: Where the store is, if it is not this worker's own.
        self._server: tuple[str, int] | None = None
        if endpoint != own.endpoint:
            host, _, port = endpoint.rpartition(":")
            self._server = host, int(port)
            # A store's client does not tell whether there is no way or just no answer.
            self._dial(host, int(port)).close()
            self._store = self._call(lambda: _connect(host, int(port)))
        self._store = PrefixStore(self.secret("store").hex(), self._store)

    def secret(self, *purpose: str) -> bytes:
        """32 bytes that only the workers of this rendezvous have."""
        return hmac.digest(self._secret, "|".join(purpose).encode(), "sha256")

    def _call(self, call: Callable[[], T]) -> T:
        limit_s = STORE_TIMEOUT.total_seconds() + STORE_GRACE_S
        with peers_may_fail():
            return self._waits.run(call, limit_s, doubt=self._look_for_server)

    def _look_for_server(self) -> None:
        """Raises TransportError where the way to the store is gone since it was connected to.

        The kernel of its host answers, and is asked in small pieces, so that a release ends this.
        """
        if self._server is None:
            return
        host, port = self._server
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setblocking(False)
            problem = probe.connect_ex((host, port))
            if problem == errno.EINPROGRESS:
                problem = self._wait_connected(probe)
        if problem == errno.ECONNREFUSED:
            raise TransportError(f"{host} does not take a connection any more")
        if problem:
            raise Unreached(f"{host} does not answer any more: {os.strerror(problem)}")

    def _wait_connected(self, probe: socket.socket) -> int:
        """The kernel's error number of the connecting; 0 after a release, when it does not
        matter."""
        poll = select.poll()
        poll.register(probe, select.POLLOUT)
        until = time.monotonic() + DIAL_LIMIT_S
        while not self._waits.released:
            if poll.poll(1000 * ARRIVAL_POLL.total_seconds()):
                return probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if time.monotonic() > until:
                return errno.ETIMEDOUT
        return 0

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """The value that stands there already."""
        return self._call(lambda: self._store.get(key)).decode()

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """The values that stand there already, in one exchange."""
        return [value.decode() for value in self._call(lambda: self._store.multi_get(list(keys)))]

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self._call(lambda: self._store.compare_set(key, expected, desired)).decode()

    def has(self, key: str, within: timedelta) -> bool:
        """Wait that long for a value to stand there."""

        def wait() -> bool:
            try:
                self._store.wait([key], within)
            except DistStoreError:  # nothing but the time-out
                return False
            return True

        return self._call(wait)

    def _dial(self, host: str, port: int) -> socket.socket:
        try:
            return self._waits.run(lambda: socket.create_connection((host, port), DIAL_LIMIT_S))
        except ConnectionError as error:  # its host does answer
            raise TransportError(f"{host} does not take a connection: {error}") from None
        except OSError as error:
            raise Unreached(f"{host} does not answer: {error}") from None

    def build(self, name: str, build: Callable[[Store], T], limit: timedelta) -> T:
        """Build a group that may use its part of the store at any time."""
        limit_s = (STORE_TIMEOUT + limit).total_seconds()
        with peers_may_fail():
            return self._waits.run(lambda: build(PrefixStore(name, self._store)), limit_s)


def read_cards(rendezvous: RendezvousStore, size: int) -> list[Card]:
    """Where all members listen, by rank, once they have arrived. Raises TransportError."""
    try:
        return [Card.read(text) for text in rendezvous.get_all([f"card/{r}" for r in range(size)])]
    except ValueError as error:
        raise TransportError(f"a member's card cannot be read: {error}") from None


def _connect(host: str, port: int) -> Store:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)


def await_arrival(
    rendezvous: RendezvousStore, size: int, check_wanted: Callable[[], None], generation: Generation
) -> None:
    """Return once all `size` workers of `generation` have arrived.

    Groups are built after this, and building one cannot be called off. So all go on or none does:
    the last to arrive and whoever first sees, by `check_wanted` raising, that a newer generation
    is wanted, race for one word in the store. Raises Superseded in the latter case.
    """
    if rendezvous.add("arrived", 1) == size:
        rendezvous.compare_set("outcome", "", _GO)
    while True:
        try:
            check_wanted()
        except Superseded:
            if rendezvous.compare_set("outcome", "", _CALLED_OFF) == _CALLED_OFF:
                raise
            return  # too late: the others rely on this worker, and it can leave right after
        if rendezvous.has("outcome", ARRIVAL_POLL):
            if rendezvous.get("outcome") == _CALLED_OFF:
                raise Superseded(Generation(generation + 1))
            return

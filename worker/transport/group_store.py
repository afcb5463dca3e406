"""The store in which the members of NCCL's groups find each other; one of the workers serves it.

A store's client may wait for ever for a stopped host, whatever its time-out: the kernel of that
host takes connections and requests, and nobody answers. So every call can be given up. Must not
know what the groups are for.
"""

import hmac
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from oobleck.worker.runtime.errors import peers_may_fail
from oobleck.worker.runtime.waiting import Waits

T = TypeVar("T")

#: For the exchanges with a store, whose server is known to be up: this long only where a host is
#: busy with other things. Who dies or is superseded meanwhile releases the wait.
STORE_TIMEOUT = timedelta(seconds=30)


class StoreServer:
    """The store that this worker serves for its lifetime, so that any generation may use it."""

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


class GroupStore:
    """The part of a store that one meeting's groups use."""

    def __init__(self, endpoint: str, prefix: str, *, own: StoreServer, waits: Waits) -> None:
        """In the `own` store, or in another worker's. Raises TransportError.

        Only the plan's workers know `prefix`. Anybody who reaches the store can read what is in it,
        so keys are derived from the prefix and do not reveal it.
        """
        self._waits = waits
        store: Store = own.store
        if endpoint != own.endpoint:
            host, _, port = endpoint.rpartition(":")
            with peers_may_fail():
                store = waits.run(
                    lambda: TCPStore(
                        host,
                        int(port),
                        is_master=False,
                        wait_for_workers=False,
                        timeout=STORE_TIMEOUT,
                    ),
                    STORE_TIMEOUT.total_seconds(),
                )
        self._store = PrefixStore(hmac.digest(prefix.encode(), b"store", "sha256").hex(), store)

    def build(self, name: str, build: Callable[[Store], T], limit: timedelta) -> T:
        """Build a group that may use its part of the store at any time."""
        limit_s = (STORE_TIMEOUT + limit).total_seconds()
        with peers_may_fail():
            return self._waits.run(lambda: build(PrefixStore(name, self._store)), limit_s)

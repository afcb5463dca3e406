"""Where the workers of a generation meet before they can talk: a store that one of them serves.

Owns the store's both ends and the meeting itself, which all members leave together: towards the
building of groups, or back because a newer generation is wanted. Must not know groups or plans.
"""

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistStoreError

from oobleck.planner.ids import Generation
from oobleck.worker.errors import Superseded
from oobleck.worker.transport import peers_may_fail

#: For the exchanges with a store, whose server is known to be up.
STORE_TIMEOUT = timedelta(seconds=5)
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


def connect_store(endpoint: str) -> Store:
    host, _, port = endpoint.rpartition(":")
    with peers_may_fail():
        return TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
        )


def await_arrival(
    place: Store, size: int, check_wanted: Callable[[], None], generation: Generation
) -> None:
    """Return once all `size` workers of `generation` have arrived.

    Groups are built after this, and building one cannot be called off. So all go on or none does:
    the last to arrive and whoever first sees, by `check_wanted` raising, that a newer generation
    is wanted, race for one word in the store. Raises Superseded in the latter case.
    """
    with peers_may_fail():
        if place.add("arrived", 1) == size:
            place.compare_set("outcome", "", _GO)
    while True:
        try:
            check_wanted()
        except Superseded:
            with peers_may_fail():
                if place.compare_set("outcome", "", _CALLED_OFF).decode() == _CALLED_OFF:
                    raise
                return  # too late: the others rely on this worker, and it can leave right after
        # A DistStoreError is nothing but the poll's time-out.
        with peers_may_fail(), contextlib.suppress(DistStoreError):
            place.wait(["outcome"], ARRIVAL_POLL)
            if place.get("outcome").decode() == _CALLED_OFF:
                raise Superseded(Generation(generation + 1))
            return

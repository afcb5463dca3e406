"""Building a gloo group is called off at once, whatever it waits for, and leaves nothing behind."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.rendezvous import RendezvousStore, StoreServer
from support.leftovers import nothing_left_behind

HOUR = timedelta(hours=1)
SIZE = 3


def connect(rendezvous: RendezvousStore, rank: int, size: int = SIZE) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = HOUR
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return rendezvous.connect("g", lambda store: ProcessGroupGloo(store, rank, size, options), HOUR)


@pytest.fixture(scope="module")
def server() -> StoreServer:
    return StoreServer("127.0.0.1")


class Builder:
    """One member of a group, that a thread builds."""

    def __init__(self, server: StoreServer, meeting: str, rank: int) -> None:
        self.waits = Waits()
        self.rendezvous = RendezvousStore(server.endpoint, meeting, own=server, waits=self.waits)
        self.error = ""  # not the exception: its traceback refers to the group
        self.thread = threading.Thread(target=self._build, args=(rank,), daemon=True)
        self.thread.start()

    def _build(self, rank: int) -> None:
        try:
            connect(self.rendezvous, rank)
        except TransportError as error:
            self.error = str(error)

    def released(self) -> str:
        self.waits.release()
        self.thread.join(30)
        self.waits.close()
        assert not self.thread.is_alive()
        return self.error


def key_of(server: StoreServer, meeting: str, rank: int) -> str:
    """Where a member leaves its address in the whole store."""
    waits = Waits()
    rendezvous = RendezvousStore(server.endpoint, meeting, own=server, waits=waits)
    waits.close()
    return f"{rendezvous.proof('store').hex()}/g/0/{rank}"


def left_by(server: StoreServer, meeting: str, rank: int) -> bytes:
    """What a member has left for the others, as soon as it has."""
    store: Store = server.store
    key = key_of(server, meeting, rank)
    deadline = time.monotonic() + 60
    while not store.check([key]):  # a wait would keep the builders out of their common client
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return store.get(key)


def port_offset(told: bytes) -> int:
    """Where the port is in what a member leaves: after its host's name, a length, a family."""
    return 8 + int(struct.unpack_from("@Q", told)[0]) + 8 + 2


def with_port(told: bytes, port: int) -> bytes:
    """The same address at another port."""
    at = port_offset(told)
    return told[:at] + struct.pack("!H", port) + told[at + 2 :]


@contextmanager
def stopped_members(server: StoreServer, meeting: str) -> Iterator[None]:
    """All members but the first: the kernel takes the calls, and nobody answers or calls.

    Gloo decides by the ports who calls whom: the first member has to wait now for all, now for one
    or none.
    """
    told = left_by(server, meeting, 0)
    with ExitStack() as stack:
        for rank in range(1, SIZE):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            left = with_port(told, listener.getsockname()[1])
            server.store.set(key_of(server, meeting, rank), left)  # type: ignore[arg-type]  # stubs: str
        yield


def test_a_group_is_built_by_it(server: StoreServer) -> None:
    with nothing_left_behind():
        builders = [Builder(server, "whole", rank) for rank in range(SIZE)]
        for builder in builders:
            builder.thread.join(60)
            builder.waits.close()
        assert [builder.error for builder in builders] == [""] * SIZE


def test_called_off_while_a_member_has_left_no_address(server: StoreServer) -> None:
    with nothing_left_behind():
        builders = [Builder(server, "absent", rank) for rank in range(SIZE - 1)]
        for rank in range(SIZE - 1):
            left_by(server, "absent", rank)
        assert all("given up" in builder.released() for builder in builders)


def test_called_off_while_members_that_are_stopped_do_not_connect(server: StoreServer) -> None:
    with nothing_left_behind():
        builder = Builder(server, "stopped", 0)
        with stopped_members(server, "stopped"):
            time.sleep(0.2)  # for gloo to come that far; earlier it is called off just as well
            builder.released()


def test_one_generation_after_the_other_is_called_off(server: StoreServer) -> None:
    with nothing_left_behind():
        for generation in range(10):
            builder = Builder(server, f"again {generation}", 0)
            with stopped_members(server, f"again {generation}"):
                builder.released()

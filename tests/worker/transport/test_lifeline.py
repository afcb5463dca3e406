"""The ring of lifelines: who waits for the neighbour to close it is not taken for hung."""

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from oobleck.planner.ids import Generation
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import Superseded
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.lifeline import Lifeline, answers
from oobleck.worker.transport.rendezvous import PROOF_BYTES, RendezvousStore, StoreServer
from support.waiting import until


@pytest.fixture
def rendezvous() -> Iterator[RendezvousStore]:
    server, waits = StoreServer("127.0.0.1"), Waits()
    yield RendezvousStore(server.endpoint, "here", own=server, waits=waits)
    waits.close()


def test_a_worker_waits_for_a_neighbour_that_does_not_come(rendezvous: RendezvousStore) -> None:
    """The kernel takes connections to a process that is stopped, which then never greets."""
    stopped, here = (Lifeline(rendezvous, rank, 2, "127.0.0.1", silence_s=8) for rank in range(2))
    seen: list[bool] = []

    def look() -> None:
        seen.append(pulse.read().waiting)
        raise Superseded(Generation(2))

    try:
        with pytest.raises(Superseded):
            here.connect(lambda _: None, look)
        assert seen == [True]
        assert not pulse.read().waiting
    finally:
        stopped.close(goodbye=False)
        here.close(goodbye=False)


def test_silent_strangers_keep_no_neighbours_waiting(rendezvous: RendezvousStore) -> None:
    ring = [Lifeline(rendezvous, rank, 2, "127.0.0.1", silence_s=8) for rank in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for rank in (0, 1):
            host, _, port = rendezvous.get(f"lifeline/{rank}").rpartition(":")
            for said in (b"", b"half", b"", bytes(PROOF_BYTES), b""):
                stranger = socket.create_connection((host, int(port)))
                stack.enter_context(stranger).sendall(said)
        lost: list[str] = []
        closed = [pool.submit(each.connect, lost.append, lambda: None) for each in ring]
        for each in closed:
            each.result(60)
        for each in ring:
            each.close(goodbye=True)
        assert lost == []


def test_peers_that_give_no_sign_of_life_are_known_by_rank(rendezvous: RendezvousStore) -> None:
    """Kernels ask each other every second: these are silent in between, for the shortest limit."""
    ring = [
        Lifeline(rendezvous, rank, 4, "127.0.0.1", silence_s=silence_s)
        for rank, silence_s in enumerate((1.2, 3600.0, 3600.0, 1.2))
    ]
    stack = contextlib.ExitStack()
    try:
        with ThreadPoolExecutor(4) as pool:
            for closed in [pool.submit(each.connect, _nothing_lost, _wanted) for each in ring]:
                closed.result()
        peer = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        shown = stack.enter_context(socket.create_connection(peer.getsockname()))
        ring[0].show(2, shown)
        until(lambda: ring[0].silent() == [1, 2, 3], "silence of both neighbours and one more")
        until(lambda: ring[3].silent() == [0, 2], "silence of both neighbours")
        assert ring[1].silent() == []
    finally:
        stack.close()
        for each in ring:
            each.close(goodbye=True)
        until(lambda: not any(t.name == "lifeline" for t in threading.enumerate()), "their threads")


def _nothing_lost(how: str) -> None:
    raise AssertionError(how)


def _wanted() -> None:
    """Nothing newer is."""


def test_a_silent_connection_to_a_host_that_answers_is_no_loss(rendezvous: RendezvousStore) -> None:
    """What is on its way may hide the signs of life: the host is asked by one more connection."""
    lost: list[str] = []
    ring = [Lifeline(rendezvous, rank, 2, "127.0.0.1", silence_s=1.2) for rank in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for closed in [pool.submit(each.connect, lost.append, _wanted) for each in ring]:
            closed.result()
        peer = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        shown = stack.enter_context(socket.create_connection(peer.getsockname()))
        stack.enter_context(peer.accept()[0])
        ring[0].show(1, shown)
        peer.settimeout(60)
        for _ in range(2):
            peer.accept()[0].close()
        for each in ring:
            each.close(goodbye=True)
    assert lost == []


def test_who_has_no_descriptor_left_to_ask_with_does_not_call_the_other_host_silent() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        link = stack.enter_context(socket.create_connection(peer.getsockname()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            assert answers(link)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

"""The ring of lifelines: who waits for the neighbour to close it is not taken for hung."""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from oobleck.planner.ids import Generation
from oobleck.worker import pulse
from oobleck.worker.errors import Superseded
from oobleck.worker.lifeline import Lifeline
from oobleck.worker.rendezvous import PROOF_BYTES, Place, StoreServer
from oobleck.worker.waiting import Waits

# The ring's connections are shut down at its end, and closed by the collector once nobody watches.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*unclosed.*:ResourceWarning",
    "ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture
def place() -> Iterator[Place]:
    server, waits = StoreServer("127.0.0.1"), Waits()
    yield Place(server.endpoint, "here", own=server, waits=waits)
    waits.close()


def test_a_worker_waits_for_a_neighbour_that_does_not_come(place: Place) -> None:
    """The kernel takes connections to a process that is stopped, which then never greets."""
    stopped, here = (Lifeline(place, rank, 2, "127.0.0.1", silence_s=8) for rank in range(2))
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


def test_silent_strangers_keep_no_neighbours_waiting(place: Place) -> None:
    ring = [Lifeline(place, rank, 2, "127.0.0.1", silence_s=8) for rank in range(2)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for rank in (0, 1):
            host, _, port = place.get(f"lifeline/{rank}").rpartition(":")
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

"""PeerConnections: what comes early, what does not fit, what ends a wait, and who is let in."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.acceptor import MOST
from oobleck.worker.transport.peer_connections import MOST_BYTES, PeerConnections
from oobleck.worker.transport.rendezvous import RendezvousStore, StoreServer

#: Of one message; many of them are more than the kernel holds for a connection.
LARGEST = MOST_BYTES // 4


@pytest.fixture
def rendezvous() -> Iterator[RendezvousStore]:
    server, waits = StoreServer("127.0.0.1"), Waits()
    yield RendezvousStore(server.endpoint, "here", own=server, waits=waits)
    waits.close()


@pytest.fixture
def pair(rendezvous: RendezvousStore) -> Iterator[tuple[PeerConnections, PeerConnections]]:
    both = (
        PeerConnections(rendezvous, 0, {1}, "127.0.0.1"),
        PeerConnections(rendezvous, 1, {0}, "127.0.0.1"),
    )
    yield both
    for connections in both:
        connections.close()


def test_messages_come_before_and_after_they_are_waited_for(
    pair: tuple[PeerConnections, PeerConnections],
) -> None:
    here, there = pair
    for value in (1.0, 2.0, 3.0):
        there.send(torch.full((3,), value), 0, 7).wait()
    there.send(torch.full((2,), 9.0), 0, 8).wait()
    tensors = [torch.zeros(2), torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    receives = [here.receive(tensors[0], 1, 8), here.receive(tensors[1], 1, 7)]
    for receive in receives:
        receive.wait()
    here.receive(tensors[2], 1, 7).wait()
    posted = here.receive(tensors[3], 1, 7)
    posted.wait()
    assert [t.unique().tolist() for t in tensors] == [[9.0], [1.0], [2.0], [3.0]]
    late = here.receive(tensors[0], 1, 9)
    there.send(torch.full((2,), 5.0), 0, 9).wait()
    late.wait()
    assert tensors[0].tolist() == [5.0, 5.0]


def test_both_may_send_more_than_fits_before_either_receives(
    pair: tuple[PeerConnections, PeerConnections],
) -> None:
    count = 100  # 50 MiB each way

    def exchange(connections: PeerConnections, peer: int) -> list[float]:
        sends = [connections.send(torch.full((LARGEST,), float(n)), peer, n) for n in range(count)]
        for send in sends:
            send.wait()
        tensor = torch.empty(LARGEST)
        seen = []
        for n in range(count):
            connections.receive(tensor, peer, n).wait()
            assert tensor[0] == tensor[-1]
            seen.append(float(tensor[0]))
        return seen

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(exchange, pair, (1, 0)))
    assert found == [[float(n) for n in range(count)]] * 2


def test_tensors_stay_what_they_are(pair: tuple[PeerConnections, PeerConnections]) -> None:
    """Any type, none or one element, a part of a larger one; and their storage can be freed."""
    here, there = pair
    whole = torch.arange(6, dtype=torch.bfloat16)
    sent = [whole[2:4], torch.tensor(7.0, dtype=torch.float64), torch.empty(0), torch.tensor([3])]
    rooms = [torch.zeros_like(tensor) for tensor in sent]
    for tag, (tensor, room) in enumerate(zip(sent, rooms, strict=True)):
        there.send(tensor, 0, tag).wait()
        here.receive(room, 1, tag).wait()
        assert torch.equal(room, tensor)
    for tensor in (whole, rooms[0]):
        tensor.untyped_storage().resize_(0)


def test_what_came_before_the_peer_left_is_there(
    pair: tuple[PeerConnections, PeerConnections],
) -> None:
    here, there = pair
    there.send(torch.full((3,), 6.0), 0, 7).wait()
    there.close()
    tensor = torch.zeros(3)
    here.receive(tensor, 1, 7).wait()
    assert tensor.tolist() == [6.0] * 3
    with pytest.raises(TransportError, match="closed"):
        here.receive(tensor, 1, 7).wait()


@pytest.mark.parametrize("at", ["here", "there"])
def test_abort_ends_waits_at_both_ends(
    pair: tuple[PeerConnections, PeerConnections], at: str
) -> None:
    here, there = pair
    there.send(torch.zeros(1), 0, 1).wait()
    here.receive(torch.zeros(1), 1, 1).wait()  # both are connected now

    def wait(connections: PeerConnections, peer: int) -> str:
        with pytest.raises(TransportError) as caught:
            connections.receive(torch.zeros(1), peer, 2).wait()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(wait, here, 1), pool.submit(wait, there, 0)]
        time.sleep(0.1)  # for both to wait; either order is right
        (here if at == "here" else there).abort()
        assert all(done.result(timeout=60) for done in waits)
    for connections, peer in ((here, 1), (there, 0)):
        connections.abort()
        with pytest.raises(TransportError, match="given up"):
            connections.send(torch.zeros(1), peer, 3)


def test_abort_ends_the_wait_for_a_peer_that_never_calls(rendezvous: RendezvousStore) -> None:
    connections = PeerConnections(rendezvous, 0, {1}, "127.0.0.1")
    threading.Timer(0.1, connections.abort).start()
    with pytest.raises(TransportError, match="given up"):
        connections.send(torch.zeros(1), 1, 0)
    connections.close()


def test_silent_stranger_keeps_nobody_waiting(rendezvous: RendezvousStore) -> None:
    here = PeerConnections(rendezvous, 0, {1}, "127.0.0.1")
    host, port, _ = rendezvous.get("connection/0").split("|")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"half a greeting")
        there = PeerConnections(rendezvous, 1, {0}, "127.0.0.1")
        there.send(torch.tensor([4.0]), 0, 5).wait()
        tensor = torch.zeros(1)
        here.receive(tensor, 1, 5).wait()
        assert tensor.item() == 4.0
        here.close()
        with contextlib.suppress(ConnectionResetError):  # as where it was not even listened to
            assert stranger.recv(1) == b""
    there.close()


def test_a_crowd_of_silent_strangers_takes_no_more_than_its_part(
    rendezvous: RendezvousStore,
) -> None:
    here = PeerConnections(rendezvous, 0, {1}, "127.0.0.1")
    host, port, _ = rendezvous.get("connection/0").split("|")
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        tensor = torch.zeros(1)
        received = pool.submit(lambda: here.receive(tensor, 1, 5).wait())
        crowd = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(2 * MOST)
        ]
        # As long as it waits it lets callers in, so the first ones go.
        for stranger in crowd[:MOST]:
            stranger.settimeout(60)
            assert stranger.recv(1) == b""
        assert len(os.listdir("/proc/self/fd")) <= before + len(crowd) + MOST
        there = PeerConnections(rendezvous, 1, {0}, "127.0.0.1")
        there.send(torch.tensor([4.0]), 0, 5).wait()
        received.result(60)
        assert tensor.item() == 4.0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        here.close()
        there.close()


@pytest.mark.parametrize("knows", ["nothing", "what is in the store", "another meeting"])
def test_stranger_is_not_let_in(rendezvous: RendezvousStore, knows: str) -> None:
    here = PeerConnections(rendezvous, 0, {1}, "127.0.0.1")
    host, port, token = rendezvous.get("connection/0").split("|")
    server, waits = StoreServer("127.0.0.1"), Waits()
    other = RendezvousStore(server.endpoint, "there", own=server, waits=waits)
    shown = {
        "nothing": bytes(16),
        "what is in the store": bytes.fromhex(token),
        "another meeting": other.proof("connection", token, "1"),
    }[knows]
    waits.close()
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(shown + (1).to_bytes(4, "big"))
        there = PeerConnections(rendezvous, 1, {0}, "127.0.0.1")
        there.send(torch.tensor([4.0]), 0, 5).wait()
        tensor = torch.zeros(1)
        here.receive(tensor, 1, 5).wait()
        assert tensor.item() == 4.0
        assert stranger.recv(1) == b""
    here.close()
    there.close()

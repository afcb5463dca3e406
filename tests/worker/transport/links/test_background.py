"""What is sent ahead of a later meeting stands in the way of nothing."""

import socket
import time

import pytest
import torch

from oobleck.worker.transport.links.link import Incoming, Link
from oobleck.worker.transport.links.wire import HEADER, Kind, Label
from support.meeting import SECRET, Party
from support.waiting import until

FEED = Label(Kind.FEED, 0, 0)
SIZE = 16 << 10


class Coming:
    """A meeting that is prepared, which takes all that comes."""

    epoch = 9

    def __init__(self) -> None:
        self.frames = 0

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        self.frames += 1
        return None

    def cut(self, peer: bytes) -> None:
        pass


def test_what_is_urgent_waits_for_no_more_than_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oobleck.worker.transport.links.link._IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr("oobleck.worker.transport.links.link._IN_FLIGHT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with socket.create_connection(listener.getsockname()) as near:
            far, _ = listener.accept()
            link = Link(b"", b"", 1, near, lambda epoch, label: None)
            for _ in range(30):
                link.send(9, FEED, memoryview(bytes(SIZE)))
            for _ in range(10):  # far reads nothing meanwhile
                link.write(background=True)
            link.send(1, Label(Kind.WORDS, 0, 0), memoryview(b"now"))
            assert link.holds_back
            kinds = []
            with far, far.makefile("rb") as stream:
                while len(kinds) < 31:
                    link.write(background=True)
                    _, kind, _, _, size = HEADER.unpack(stream.read(HEADER.size))
                    kinds.append(kind)
                    link.write(background=True)
                    stream.read(size)
            assert kinds.index(Kind.WORDS) <= 2
            assert kinds.count(Kind.FEED) == 30


def test_while_one_link_has_more_than_it_can_take_nothing_is_sent_ahead_on_another() -> None:
    with Party(3) as party:
        giver, busy, taker = party.meet()
        coming = Coming()
        taker.links.expect(SECRET, coming)
        giver.links.expect(SECRET, Coming())
        content = torch.zeros(8 << 20)  # more than the kernel takes
        ahead = memoryview(bytes(SIZE))
        feeding = giver.links._feeding
        assert feeding is not None
        with busy.links.lock:  # it reads nothing
            sent = giver.send(content, 1, 0)
            with giver.links.lock:
                frame = giver.links.send_ahead(feeding, taker.links.identity, FEED, ahead)
            time.sleep(0.05)
            assert not frame.done
            assert coming.frames == 0
        busy.receive(torch.empty_like(content), 0, 0).wait()
        sent.wait()
        until(lambda: coming.frames == 1, "what is sent ahead")


def test_while_one_link_has_much_in_flight_nothing_is_sent_ahead_on_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Party(3) as party:
        giver, busy, taker = party.meet()
        coming = Coming()
        taker.links.expect(SECRET, coming)
        giver.links.expect(SECRET, Coming())
        feeding = giver.links._feeding
        assert feeding is not None
        far = {busy.links.identity}
        with giver.links.lock:
            monkeypatch.setattr(Link, "has_little_in_flight", lambda link: link.peer not in far)
            frame = giver.links.send_ahead(feeding, taker.links.identity, FEED, memoryview(b"now"))
        time.sleep(0.05)
        assert not frame.done
        far.clear()
        until(lambda: coming.frames == 1, "what is sent ahead")

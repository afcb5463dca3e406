"""How a meeting ends early, and a link, and the links' own thread: nobody waits for ever, nothing
that was said is lost, and nothing is told of a meeting that is over."""

import select
import socket
import threading
from collections.abc import Sequence

import pytest
import torch

from oobleck.worker.runtime.errors import CalledOff, InvariantViolation, TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.attendance import Attendance
from oobleck.worker.transport.links.link import Early, Link
from oobleck.worker.transport.links.wire import HEADER, SIZES, Kind, Label
from support.meeting import SECRET, Party
from support.waiting import PATIENCE_S, until


@pytest.mark.parametrize(
    ("kind", "error"), [(Kind.GIVEN_UP, TransportError), (Kind.CALLED_OFF, CalledOff)]
)
def test_two_that_wait_for_each_other_are_released_by_a_third_that_leaves(
    kind: Kind, error: type[TransportError]
) -> None:
    """Each waits for the sum that the other adds up, and both lack the third one's share."""
    group, lost, both_wait = (0, 1, 2), [], threading.Barrier(3)
    with Party(3) as party:
        party.meet(on_lost=lambda rank, why: lost.append(rank))

        def add(transport: LinkTransport) -> None:
            if transport.rank == 2:
                both_wait.wait(PATIENCE_S)
                transport.links.leave(1, kind)
                return
            for_ever = threading.Timer(20, transport.abort)
            for_ever.start()
            sums = [transport.all_reduce(torch.ones(4), group) for _ in group[:2]]
            both_wait.wait(PATIENCE_S)
            with pytest.raises(error, match=r"has left|called off"):
                sums[1 - transport.rank].wait()
            for_ever.cancel()

        party.everywhere(add)
        assert lost == []


def test_who_has_come_and_left_before_the_host_came_ends_the_meeting() -> None:
    with Party(2) as party:
        party.meet()
        with party.links[0].lock:
            party.links[0].press(+1)  # reads while nobody waits
        early = LinkTransport(party.links[1], 9, SECRET, 1, 2)
        coming = threading.Thread(target=come_in_vain, args=(early, party))
        coming.start()
        until(lambda: party.links[0]._attendance._ahead.get(9), "it has come")
        early.abort()
        coming.join()
        until(lambda: party.links[0]._attendance._left_ahead.get(9), "it has left")
        host = LinkTransport(party.links[0], 9, SECRET, 0, 2)
        with pytest.raises(TransportError, match="has left"):
            host.meet(party.links[0].card, {1}, b"", lambda: None)


def come_in_vain(transport: LinkTransport, party: Party) -> None:
    with pytest.raises(TransportError, match="given up"):
        transport.meet(party.links[0].card, {0}, b"", lambda: None)


def test_what_a_peer_said_before_its_end_is_heard_though_nothing_can_be_written_to_it() -> None:
    lost: list[int] = []
    with Party(2) as party:
        here, there = party.meet(on_lost=lambda rank, why: lost.append(rank))
        link = here.links._links[there.links.identity]
        value = torch.zeros(1)
        arriving = here.receive(value, 1, 3)
        with here.links.lock:  # so nothing is read meanwhile
            there.send(torch.full((1,), 5.0), 0, 3).wait()
            there.stand_down()
            party.links[1].close()

            def cannot_be_written_to() -> bool:
                here.send(torch.ones(1), 1, 1)
                return link.problem is not None

            until(cannot_be_written_to, "an error")
        arriving.wait()
        assert value.tolist() == [5.0]
        with pytest.raises(TransportError, match="has left"):
            here.receive(value, 1, 3).wait()
        assert lost == []


def test_a_loss_is_not_told_once_the_meeting_was_left() -> None:
    told: list[tuple[int, str]] = []
    with Party(3) as party:
        here = party.meet(on_lost=lambda rank, why: told.append((rank, "first")))[0]
        with here.links.lock:
            here.links.ended(here.links._links[party.links[1].identity], ConnectionError("gone"))
            assert here.links._to_tell is here
            here.abort()
        here.links._tell_lost(here)  # as a thread that comes late
        until(lambda: not party.links[1].linked(here.links.identity), "its other end is over too")
        party.meet(on_lost=lambda rank, why: told.append((rank, "second")))
        party.links[2].close()
        until(lambda: {(0, "second"), (1, "second")} <= set(told), "the loss is told")
        assert (0, "first") not in told


def test_who_takes_long_over_a_loss_holds_up_no_link() -> None:
    go_on = threading.Event()

    def lost(rank: int, why: str) -> None:
        if rank == 0:
            assert go_on.wait(60)

    def talk(transport: LinkTransport) -> list[float]:
        word = torch.tensor(float(transport.rank))
        return [float(each) for each in transport.all_gather(word)]

    with Party(4) as party:
        party.meet(lambda rank, size: {0, 1, 3} if rank == 2 else {2}, on_lost=lost, host=2)
        party.links[2].close()
        until(lambda: any(t.name == "loss" for t in threading.enumerate()), "it is told")
        # Those who are left have no links yet, and get them from the links' own threads.
        party.meet(members=[party.links[rank] for rank in (0, 1, 3)])
        assert party.everywhere(talk) == [[0.0, 1.0, 2.0]] * 3
        go_on.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_the_links_own_thread_is_raised_by_whoever_uses_them_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours: what must not happen. What a peer sends is no such thing."""
    lost: list[int] = []

    def look() -> None:
        raise ValueError("wrong")

    with Party(2) as party:
        here, _ = party.meet(on_lost=lambda rank, why: lost.append(rank))
        monkeypatch.setattr(here.links._watch, "look", look)
        here.links._traffic.ring_own()
        until(lambda: here.links._traffic._failure, "the thread ends")
        for use in (
            lambda: here.links.wait(lambda: True),
            lambda: here.send(torch.ones(1), 1, 1),
            lambda: here.receive(torch.ones(1), 1, 1),
            lambda: LinkTransport(here.links, 9, SECRET, 0, 1),
            here.links.close,
        ):
            with pytest.raises(InvariantViolation, match="wrong"):
                use()
        until(lambda: lost == [1], "the peer sees the links closed")


class _Sink:
    """A socket that takes all that it is given, or nothing."""

    def __init__(self) -> None:
        self.full = True
        self.taken = b""

    def setblocking(self, blocking: bool) -> None:
        pass

    def setsockopt(self, *option: int) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.2", 1

    def recv_into(self, room: memoryview) -> int:
        raise BlockingIOError

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        if self.full:
            raise BlockingIOError
        self.taken += b"".join(parts)
        return sum(map(len, parts))


def test_what_is_urgent_goes_before_what_was_said_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """State for a coming meeting, in the background, goes behind everything."""
    monkeypatch.setattr(Link, "has_little_in_flight", lambda link: True)
    sink = _Sink()
    link = Link(b"", b"", 1, sink, lambda epoch, label: None)  # type: ignore[arg-type]
    kinds = [Kind.FEED, Kind.FEED, Kind.TOTAL, Kind.MESSAGE, Kind.SHARE, Kind.GOODBYE]
    kinds += [Kind.MESSAGE, Kind.FED, Kind.WORDS, Kind.FEED, Kind.TABLE, Kind.STANDING, Kind.PROOF]
    for number, kind in enumerate(kinds):
        link.send(1, Label(kind, number, 0), memoryview(bytes(number)))
    sink.full = False
    link.write(background=True)
    went, at = [], 0
    while at < len(sink.taken):
        _, kind, number, _, size = HEADER.unpack_from(sink.taken, at)
        assert kind == kinds[number]
        went.append(number)
        at += HEADER.size + size
    # The third had begun before what is more urgent was said.
    assert went == [2, 7, 8, 10, 11, 12, 3, 6, 4, 5, 0, 1, 9]


@pytest.mark.parametrize("kind", [*Kind, 0, 99])
def test_a_frame_of_a_size_that_none_of_its_kind_has_ends_the_link(kind: int) -> None:
    least, most = SIZES.get(kind, (0, -1))
    for size in {0, least - 1, least, most, most + 1, (1 << 64) - 1}:
        if size < 0:
            continue
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        with near, far:
            link = Link(b"", b"", 1, far, lambda epoch, label: Early())
            near.sendall(HEADER.pack(0, kind, 0, 0, size))
            select.select([far], [], [], 20)
            error = BlockingIOError if least <= size <= most else ConnectionError
            for _ in range(2):  # nothing is read behind it
                with pytest.raises(error):
                    link.read(lambda epoch, kind, content: None)


def test_of_later_meetings_the_newest_few_of_each_member_are_remembered() -> None:
    attendance = Attendance()
    for epoch in range(1, 100):
        attendance.keep(b"a", epoch, Kind.STANDING, b"%d" % epoch)
        attendance.keep(b"a", epoch, Kind.GIVEN_UP, b"")
    attendance.keep(b"b", 3, Kind.STANDING, b"b")
    for epoch, ahead, left in [
        (3, {b"b": b"b"}, {}),
        (95, {}, {}),
        (96, {b"a": b"96"}, {b"a": Kind.GIVEN_UP}),
        (99, {b"a": b"99"}, {b"a": Kind.GIVEN_UP}),
        (100, {}, {}),
    ]:
        assert attendance.begin(epoch) == ahead
        assert attendance.left == left


def test_a_link_is_written_to_in_turns() -> None:
    sink = _Sink()
    # As much of a socket as is used.
    link = Link(b"", b"", 1, sink, lambda epoch, label: None)  # type: ignore[arg-type]
    content = memoryview(bytes(300 << 10))
    frames = [link.send(1, Label(Kind.MESSAGE, number, 0), content) for number in range(10)]
    sink.full = False
    turns = []
    while link.blocked:
        before = sum(frame.done for frame in frames)
        link.write()
        turns.append(sum(frame.done for frame in frames) - before)
    assert turns == [4, 4, 2]


@pytest.mark.parametrize(("count", "stays"), [(1, True), (2, False)])
def test_what_comes_for_a_meeting_that_has_not_begun_is_bounded(count: int, stays: bool) -> None:
    lost: list[tuple[int, str]] = []
    size = 600 << 10
    label, content = Label(Kind.MESSAGE, 7, 0), memoryview(bytes(size))
    with Party(2) as party:
        here, there = party.meet(on_lost=lambda rank, why: lost.append((rank, why)))
        link = here.links._links[there.links.identity]
        for epoch in range(1, 3):
            with here.links.lock:
                here.links.press(+1)  # reads while nobody waits
            with there.links.lock:
                for _ in range(count):
                    there.links._write(
                        there.links._links[here.links.identity], epoch + 1, label, content
                    )
            if not stays:
                until(lambda: "rank 1: sent more than" in dict(lost).get(0, ""), "the end")
                return
            until(lambda: link._early, "it comes")
            here, there = party.meet()
            here.receive(torch.ones(size // 4), 1, 7).wait()

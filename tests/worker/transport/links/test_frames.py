"""One frame ends a link at most: whatever a member sends, or one that was a member, behind a valid
seal, the process that reads it goes on with all its other peers."""

import contextlib
import random
import socket
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.support.preloaded import Preloaded
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import PeerLost
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport, _key_of
from oobleck.worker.transport.links import hub
from oobleck.worker.transport.links.calls import MOST_SERIAL
from oobleck.worker.transport.links.greeting import TAG_BYTES, prove_member
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming
from oobleck.worker.transport.links.wire import HEADER, PIECE_BYTES, SIZES, Kind, Label, SealedWire
from oobleck.worker.transport.meeting import _MEETING
from oobleck.worker.transport.tree import Words, entry, joined, parts, words_of_all
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.meeting import SECRET, Party
from support.reference import train_reference
from support.waiting import until

GROUP = (0, 1, 2)
TAG = 7
LATER = b"l" * 32
#: For its content no room is given, and it is not looked at.
UNKNOWN = (0, 14, 255)
SENT_BYTES = 1 << 20


class Forger:
    """One end of a real link, which sends what it likes behind the seal."""

    def __init__(self, links: Links, to: Links) -> None:
        self._links, self._to = links, to
        self._link = links._links[to.identity]
        self._lock = links.lock

    def send(self, epoch: int, label: Label, size: int, content: bytes) -> None:
        """`size`: what the header says. The content is sealed as one of that size is."""
        wire = self._link._wire
        assert isinstance(wire, SealedWire)
        pieces = [HEADER.pack(epoch, *label, size)]
        pieces += [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
        with self._lock:
            if self._link.socket.fileno() < 0:
                return
            said = bytearray()
            for piece in pieces:
                room = bytearray(len(piece) + TAG_BYTES)
                wire._seals.outward.close(memoryview(piece), memoryview(room))
                said += room
            self._link.socket.settimeout(20)
            with contextlib.suppress(OSError):  # it was ended
                self._link.socket.sendall(said)
            self._link.socket.setblocking(False)

    def hang_up(self) -> bool:
        """Whether neither end has a link any more; one may have been made anew."""
        present = self._links._links.get(self._to.identity)
        if present is not None:
            with contextlib.suppress(OSError):  # it was ended
                present.socket.shutdown(socket.SHUT_WR)
        return present is None and not self._to.linked(self._links.identity)


class Picky(Incoming):
    """Takes what is fed, unless it has an odd size or begins with a zero."""

    def room(self, size: int) -> memoryview:
        if size % 2:
            raise KeyError(size)
        self._content = bytearray(size)
        return memoryview(self._content)

    def arrived(self) -> None:
        if not self._content[0]:
            raise ZeroDivisionError


class Fed:
    """A meeting that is prepared."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        return Picky() if label.key else None

    def cut(self, peer: bytes) -> None:
        pass


def talk(transport: LinkTransport) -> list[float]:
    return [float(each) for each in transport.all_gather(torch.tensor(float(transport.rank)))]


def sizes_of(kind: int) -> list[int]:
    least, most = SIZES.get(kind, (0, 0))
    edges = {0, 1, 7, 8, 9, 16, least - 1, least, least + 1, most, most + 1, 1 << 32, (1 << 64) - 1}
    return sorted(size for size in edges if size >= 0)


def forged(draw: random.Random, epoch: int) -> tuple[int, Label, int, bytes]:
    """A frame with each field at one of its edges, and mostly of the present meeting."""
    kind = draw.choice([*Kind, *Kind, *UNKNOWN])
    size = draw.choice(sizes_of(kind))
    keys = [TAG, _key_of(GROUP, 0), 0, _MEETING, 1, (1 << 63) - 1, -(1 << 63)]
    label = Label(kind, draw.choice(keys), draw.choice([0, 0, 1, (1 << 32) - 1]))
    when = draw.choice([epoch] * 6 + [epoch + 1, epoch - 1, 0, (1 << 64) - 1])
    content = draw.choice([bytes, lambda count: b"\1" * count, draw.randbytes])
    return when, label, size, content(min(size, SENT_BYTES))


@pytest.fixture
def party() -> Iterator[Party]:
    with Party(3) as party:
        yield party


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_member", [True, False], ids=["member", "was a member"])
def test_whatever_is_sent_behind_a_seal_ends_a_link_at_most(
    party: Party, is_member: bool, seed: int
) -> None:
    """Amid a message, a sum and a gathering that wait for just such frames, and a feed; or two
    meetings after the sender's last."""
    draw = random.Random(seed)
    reader, other, sender = party.links
    for _ in range(30):
        transport, *_ = party.meet()
        forger = Forger(sender, reader)
        if not is_member:
            for _ in range(2):
                transport, _ = party.meet(members=[reader, other], secret=LATER)
        epoch = party._epoch
        feeding = Fed(epoch + 1)
        reader.expect(SECRET, feeding)
        if is_member:
            proof = prove_member(SECRET, epoch + 1, sender.identity, reader.identity)
            forger.send(epoch + 1, Label(Kind.PROOF, 0, 0), len(proof), proof)
            transport.receive(torch.zeros(2), 2, TAG)
            transport.all_reduce(torch.ones(4), GROUP)
        frame = forged(draw, epoch)
        with reader.lock:
            reader.press(+1)  # reads while nobody waits
        forger.send(*frame)
        if is_member:
            with contextlib.suppress(TransportError):
                transport.receive(torch.zeros(2), 2, frame[1].key & 0xFF)
                transport.links.post(sender.identity, Label(Kind.WORDS, 0, 0), Words())
        else:
            assert party.everywhere(talk) == [[0.0, 1.0]] * 2, frame
        until(forger.hang_up, "all is read, and the end seen", poll_s=0.001)
        assert reader._traffic.thread.is_alive(), frame
        reader.call_off(feeding)
        party.meet(members=[reader, other])
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2, frame


@pytest.mark.parametrize("kind", [Kind.GOODBYE, Kind.GIVEN_UP, Kind.CALLED_OFF, 99])
def test_a_frame_that_breaks_the_rules_is_told_with_the_name_of_who_sent_it(
    party: Party, kind: int
) -> None:
    lost: list[tuple[int, str]] = []
    party.meet(on_lost=lambda rank, why: lost.append((rank, why)))
    reader, _, sender = party.transports
    waiting = reader.receive(torch.zeros(2), 1, TAG)
    Forger(sender.links, reader.links).send(1, Label(kind, 0, 0), 5, b"12345")
    with pytest.raises(TransportError, match=r"^rank 2: sent a .*(5 bytes|unknown kind, 99)"):
        waiting.wait()
    until(lambda: any(rank == 0 and "rank 2: sent a" in why for rank, why in lost), "it is told")


def test_what_came_early_in_a_wrong_size_ends_the_link_once_it_is_waited_for(party: Party) -> None:
    party.meet()
    reader, other, sender = party.transports
    here = reader.links._links[sender.links.identity]
    Forger(sender.links, reader.links).send(1, Label(Kind.MESSAGE, TAG, 0), 3, b"123")
    with reader.links.lock:
        reader.links.press(+1)  # reads while nobody waits
    until(lambda: here._early, "it has come")
    with pytest.raises(TransportError, match="rank 2: sent 3 bytes where 8 were expected"):
        reader.receive(torch.zeros(2), 2, TAG).wait()
    assert other.links.linked(reader.links.identity)


def test_what_nobody_waits_for_is_bounded_and_what_is_taken_counts_no_more(
    party: Party,
) -> None:
    party.meet()
    reader, _, sender = party.transports
    here = reader.links._links[sender.links.identity]
    here._most_early_bytes = 100 << 10
    forger, content = Forger(sender.links, reader.links), bytes(8 << 10)
    with reader.links.lock:
        reader.links.press(+1)  # reads while nobody waits
    for _ in range(20):
        for key in range(10):
            forger.send(1, Label(Kind.MESSAGE, key, 0), len(content), content)
        for key in range(10):
            reader.receive(torch.zeros(len(content) // 4), 2, key).wait()
    assert here._early_bytes == 0
    for key in range(200):  # nothing in them, but each is kept
        forger.send(1, Label(Kind.MESSAGE, key, 0), 0, b"")
    with pytest.raises(TransportError, match="bytes that are not waited for"):
        until(lambda: reader.check() is not None, "the link ends")  # type: ignore[func-returns-value]
    assert not reader.links.linked(sender.links.identity)


def test_a_link_to_one_outside_the_plan_is_closed_after_a_while(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a plan is prepared, in which it may be; and the next one finds it again."""
    monkeypatch.setattr(hub, "OUTSIDE_S", 0.2)
    monkeypatch.setattr(hub, "_LOOK_S", 0.01)

    def is_gone(links: Links, peer: Links) -> bool:
        links._traffic.ring_own()  # its clock ticks once a second else
        return not links.linked(peer.identity)

    lost: list[int] = []
    for transport in party.meet(on_lost=lambda rank, why: lost.append(rank)):
        transport.dispose()
    here, there, outside = party.links
    feeding = Fed(3)
    here.expect(SECRET, feeding)
    party.meet(members=[here, there], on_lost=lambda rank, why: lost.append(rank))
    until(lambda: is_gone(there, outside), "it is closed")
    time.sleep(0.3)
    assert not is_gone(here, outside)
    here.call_off(feeding)
    until(lambda: is_gone(here, outside), "the other is closed too")
    assert here.peers == {there.identity}
    until(lambda: not outside.peers, "it sees that")
    party.meet(on_lost=lambda rank, why: lost.append(rank))
    assert party.everywhere(talk) == [[0.0, 1.0, 2.0]] * 3
    assert lost == []


def test_a_caller_that_counts_as_far_as_it_goes_is_called_all_the_same(party: Party) -> None:
    here, there, other = party.links
    there._door._serials[here.identity] = MOST_SERIAL - 1
    party.meet(near=lambda rank, size: set())
    for _ in range(2):
        there.connect([here.card])
        until(lambda: here.linked(there.identity), "it has called")
        until(Forger(there, here).hang_up, "it has hung up")
        party.meet(near=lambda rank, size: set())
    here.connect([there.card])
    until(lambda: there.linked(here.identity), "it is called")
    party.meet(members=[here, other])
    assert party.everywhere(talk) == [[0.0, 1.0]] * 2


@given(st.binary(max_size=64), st.integers(0, 3))
def test_what_is_no_table_of_words_is_a_lost_connection(said: bytes, size: int) -> None:
    for table in (said, entry(0, said), entry(0, b"") + said, joined([b"", said])):
        try:
            words = words_of_all(table, size)
        except TransportError:
            continue
        assert joined(words) == table
    assert parts(joined([said, b""]), 2) == [said, b""]


# ---- real workers


@pytest.fixture(scope="module")
def misbehaving_warm(forking: Preloaded | None) -> Iterator[WarmWorkers]:
    begin = "from support import misbehaving; misbehaving.begin()"
    with WarmWorkers(preloaded=forking, before=begin) as warm:
        yield warm


def test_a_job_goes_on_when_a_member_breaks_the_rules_amid_a_step(
    misbehaving_warm: WarmWorkers,
) -> None:
    """It is told by name, and the losses are the plain loop's."""
    job = JobSpec(
        name="misbehaving",
        model=ModelSpec(layers=4, hidden=32, heads=2, sequence_length=16),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(steps=6, global_batch=6, precision="fp64"),
        data_plane="sealed",
    )
    first, second = (make_plan(at, [[("a", 3), ("b", 3)], [("c", 6)]], [3, 3]) for at in (1, 2))
    with Director(misbehaving_warm, job) as cluster:
        cluster.start("a", "b", "c")
        cluster.assign(first)
        cluster.wait(
            lambda: all(cluster.said(worker, PeerLost) for worker in first.workers), "the loss"
        )
        cluster.assign(second)
        cluster.wait_finished(second)
        cluster.stop()
        told = [said.detail for worker in first.workers for said in cluster.said(worker, PeerLost)]
        assert "b/0: sent a frame of kind GOODBYE with 5 bytes of content" in told
        expected = {step.step: step.loss for step in train_reference(job).steps}
        assert cluster.losses() == pytest.approx(expected, rel=1e-12)

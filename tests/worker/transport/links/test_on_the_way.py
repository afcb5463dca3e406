"""Somebody on the way between two workers learns nothing, changes nothing unnoticed, and gets
nowhere by what was overheard."""

import contextlib
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataPlane, DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import PeerLost
from oobleck.core.plan import Plan
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.wire import HEADER, Kind, SealedWire, bytes_of
from oobleck.worker.transport.meeting import epoch_of
from support import diverted
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.diverted import TAP, calls_diverted
from support.folders import TEXT
from support.meeting import SECRET, Party
from support.network import Host
from support.proxy import Passes, Proxy
from support.reference import train_reference
from support.waiting import until


class Heard:
    """All that went over tapped connections; passes it on as it is. A `Passes`."""

    def __init__(self) -> None:
        self.all = bytearray()
        #: By whether it came from who called.
        self.by_way: Mapping[bool, bytearray] = {True: bytearray(), False: bytearray()}

    def __call__(self, outward: bool, at: int, data: bytes) -> bytes:
        self.all += data
        self.by_way[outward].extend(data)
        return data


class Changes:
    """Changes one byte of one direction, once. A `Passes`."""

    def __init__(self, outward: bool, at: int, by: int = 0x10) -> None:
        self._outward, self._at, self._by = outward, at, by
        self.done = False

    def __call__(self, outward: bool, at: int, data: bytes) -> bytes:
        within = self._at - at
        if self.done or outward != self._outward or not 0 <= within < len(data):
            return data
        self.done = True
        return data[:within] + bytes([data[within] ^ self._by]) + data[within + 1 :]


@contextlib.contextmanager
def tapped(*cards: Card, passes: Passes) -> Iterator[None]:
    """Whoever's calls are diverted, as this process's are meanwhile, and calls one of these comes
    by way of `passes`."""
    with contextlib.ExitStack() as stack:
        for card in cards:
            target = f"{card.host}:{card.port}"
            stack.enter_context(Proxy(target, at=(TAP, card.port), passes=passes))
        stack.enter_context(calls_diverted())
        yield


#: ETH_P_ALL of Linux.
_ALL_PROTOCOLS = 3
#: Where a caller's and a called one's frames begin in what they send.
SAID_BY_CALLER = greeting.CALL_BYTES + greeting.CONFIRM_BYTES
#: In what a caller says first: whether it wants the link sealed.
SEALS_AT = len(b"oobl\2") + struct.calcsize("!QI")


def talk(transport: LinkTransport) -> list[float]:
    return [float(each) for each in transport.all_gather(torch.tensor(float(transport.rank)))]


def cards(party: Party) -> list[Card]:
    return [links.card for links in party.links]


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "clear"])
def test_who_listens_hears_nothing_of_what_is_sent(sealed: bool) -> None:
    """Of an open link all of it is heard, so it would be."""
    heard = Heard()
    weights = torch.randn(100_000)
    words = [b"what the first worker says", b"what the second worker says"]
    with Party(2, sealed=sealed) as party, tapped(*cards(party), passes=heard):
        here, there = party.meet()
        sent, got = here.send(weights, 1, 1), torch.zeros(100_000)
        there.receive(got, 0, 1).wait()
        sent.wait()
        assert torch.equal(got, weights)
        assert party.everywhere(lambda t: t.gather(words[t.rank])) == [words] * 2
    content = bytes(bytes_of(weights))
    pieces = [content[at : at + 16] for at in range(0, len(content), 4096)]
    known = [*words, *pieces, *(card.text.encode() for card in cards(party)[1:])]
    assert [piece in heard.all for piece in known] == [not sealed] * len(known)


@pytest.mark.parametrize("outward", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_byte_that_is_changed_ends_the_link_as_a_loss_and_the_next_meeting_is_whole(
    outward: bool, seed: int
) -> None:
    begin = SAID_BY_CALLER if outward else greeting.ANSWER_BYTES + len(greeting.WELCOME)
    change = Changes(outward, begin + 500 + random.Random(seed).randrange(3_000_000))
    lost: list[str] = []
    with Party(2) as party, tapped(*cards(party), passes=change):
        party.meet(on_lost=lambda rank, why: lost.append(why))

        def exchange(transport: LinkTransport) -> str:
            peer, got = 1 - transport.rank, torch.zeros(1_000_000)
            try:
                sent = transport.send(torch.ones(1_000_000), peer, 1)
                transport.receive(got, peer, 1).wait()
                sent.wait()
                talk(transport)
            except TransportError as error:
                return str(error)
            return "nothing"

        assert "nothing" not in party.everywhere(exchange)
        until(lambda: len(lost) == 2, "both are told")
        assert change.done
        assert any("changed on its way" in why for why in lost)
        party.meet()
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("outward", [True, False])
def test_nobody_on_the_way_talks_two_out_of_sealing(outward: bool) -> None:
    """The call or the answer is changed to say that the link may be open."""
    clears = Changes(outward, SEALS_AT if outward else 0, by=1)
    with Party(2) as party, tapped(*cards(party), passes=clears):
        if outward:  # taken for a stranger's, so it is made again
            party.meet()
            assert party.everywhere(talk) == [[0.0, 1.0]] * 2
            assert all_sealed(party)
        else:
            here, there = (
                LinkTransport(each, 1, SECRET, rank, 2) for rank, each in enumerate(party.links)
            )
            with pytest.raises(TransportError, match="not of this job"):
                there.meet(party.links[0].card, {0}, b"", lambda: None)
            assert not here.links.peers
        assert clears.done


def all_sealed(party: Party) -> bool:
    found = [link for links in party.links for link in links._links.values()]
    return bool(found) and all(isinstance(link._wire, SealedWire) for link in found)


@pytest.mark.parametrize("wants", [0, 1])
def test_one_end_that_wants_it_sealed_is_enough(wants: int) -> None:
    with Party(2, sealed=False) as party:
        party.links[wants].close()
        party.links[wants] = Links("127.0.0.1", silence_s=5, sealed=True)
        party.meet()
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2
        assert all_sealed(party)


def alter(at: int) -> Callable[[bytes], bytes]:
    return lambda said: said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]


def stranger_says(card: Card, said: bytes) -> bytes:
    """What is answered; nothing, where the connection is closed."""
    with socket.create_connection((card.host, card.port)) as stranger:
        stranger.settimeout(120)
        stranger.sendall(said)
        return stranger.recv(greeting.ANSWER_BYTES)


def call_of(secret: bytes, called: bytes, *, seals: bool = True) -> bytes:
    said = greeting.make_call(
        1, 9, seals, b"c" * greeting.IDENTITY_BYTES, bytes(32), greeting.fresh()
    )
    return said + greeting.prove(secret, b"call", called, said)


#: All but the epoch: a call of a meeting that is to come is kept until then, and not answered.
CHANGED = [*range(5), *range(13, greeting.CALL_BYTES)]


def test_a_call_with_any_byte_changed_is_not_answered() -> None:
    with Party(2) as party:
        party.meet()
        card = party.links[0].card
        said = call_of(SECRET, card.digest)
        assert stranger_says(card, said)
        assert [at for at in CHANGED if stranger_says(card, alter(at)(said))] == []
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2


def test_a_greeting_for_one_place_is_none_for_another() -> None:
    """Whoever is called at an address that is not its own does not answer."""
    with Party(2) as party:
        party.meet()
        card = party.links[0].card
        elsewhere = Card(card.identity, "127.0.0.2", card.port)
        assert stranger_says(card, call_of(SECRET, elsewhere.digest)) == b""
        assert stranger_says(card, call_of(SECRET, card.digest)) != b""


def test_all_that_a_caller_said_gets_nowhere_when_it_is_said_again() -> None:
    heard = Heard()
    with Party(2) as party, tapped(*cards(party), passes=heard):
        party.meet()
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2
        before = [dict(links._links) for links in party.links]
        answers = [all_answered(card, bytes(heard.by_way[True])) for card in cards(party) * 3]
        # By the one that it was said to, each time with another key; never a welcome.
        assert {len(each) for each in answers} == {0, greeting.ANSWER_BYTES}
        assert len({each for each in answers if each}) == 3
        assert [dict(links._links) for links in party.links] == before
        assert party.everywhere(talk) == [[0.0, 1.0]] * 2


def all_answered(card: Card, said: bytes) -> bytes:
    with socket.create_connection((card.host, card.port)) as stranger:
        stranger.settimeout(120)
        stranger.sendall(said[: greeting.CALL_BYTES])
        answered = stranger.recv(greeting.ANSWER_BYTES)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said[greeting.CALL_BYTES :])
            while part := stranger.recv(1000):
                answered += part
    return answered


# ---- real workers

BOTH = [worker_named("a"), worker_named("b")]


def plan_of(generation: int) -> Plan:
    return make_plan(generation, [[("a", 3), ("b", 3)]], [6])


@pytest.fixture(scope="module")
def diverted_warm() -> Iterator[WarmWorkers]:
    with WarmWorkers(within=[sys.executable, diverted.__file__]) as warm:
        yield warm


def job(data_plane: DataPlane) -> JobSpec:
    return JobSpec(
        name="tapped",
        model=ModelSpec(layers=4, hidden=32, heads=2, sequence_length=16),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(steps=6, global_batch=6, precision="fp64"),
        data_plane=data_plane,
    )


def losses_of(job: JobSpec) -> dict[int, float]:
    return {step.step: step.loss for step in train_reference(job).steps}


@pytest.mark.parametrize("data_plane", ["sealed", "clear"])
def test_workers_that_train_are_heard_only_where_the_job_wants_no_seal(
    diverted_warm: WarmWorkers, data_plane: DataPlane
) -> None:
    trained, plan, heard = job(data_plane), plan_of(1), Heard()
    with Director(diverted_warm, trained) as cluster:
        cluster.start("a", "b")
        found = [Card.read(cluster.workers[worker].card) for worker in BOTH]
        with tapped(*found, passes=heard):
            cluster.assign(plan)
            cluster.wait_finished(plan)
            cluster.stop()
        assert cluster.losses() == pytest.approx(losses_of(trained), rel=1e-12)
    header = HEADER.pack(epoch_of(plan.generation, 1), Kind.MESSAGE, 0, 0, 0)
    known = [header[: struct.calcsize("!QB")], found[1].text.encode()]
    assert len(heard.all) > 100_000
    assert [each in heard.all for each in known] == [data_plane == "clear"] * 2


def test_workers_lose_a_link_that_somebody_changes_and_train_on_over_another(
    diverted_warm: WarmWorkers,
) -> None:
    trained, plan, after = job("sealed"), plan_of(1), plan_of(2)
    change = Changes(True, SAID_BY_CALLER + 50_000)
    with Director(diverted_warm, trained) as cluster:
        cluster.start("a", "b")
        found = [Card.read(cluster.workers[worker].card) for worker in BOTH]
        with tapped(*found, passes=change):
            cluster.assign(plan)
            cluster.wait(
                lambda: all(cluster.said(worker, PeerLost) for worker in BOTH), "both lose a peer"
            )
            cluster.assign(after)
            cluster.wait_finished(after)
            cluster.stop()
        assert change.done
        details = [said.detail for worker in BOTH for said in cluster.said(worker, PeerLost)]
        assert any("changed on its way" in detail for detail in details)
        assert cluster.losses() == pytest.approx(losses_of(trained), rel=1e-12)


# ---- between hosts


@contextlib.contextmanager
def overheard(interface: str) -> Iterator[list[bytes]]:
    """What the kernel sends and receives there, packet by packet."""
    packets: list[bytes] = []
    over = threading.Event()
    ear = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(_ALL_PROTOCOLS))
    ear.bind((interface, 0))
    ear.settimeout(0.1)

    def listen() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                packets.append(ear.recv(1 << 16))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield packets
    finally:
        over.set()
        listener.join()
        ear.close()


@pytest.fixture(scope="module")
def far() -> Iterator[tuple[Host, WarmWorkers]]:
    with Host() as host, WarmWorkers(host.within) as warm:
        yield host, warm


@pytest.mark.parametrize("data_plane", ["auto", "clear"])
def test_between_hosts_nothing_is_heard_unless_the_job_wants_no_seal(
    far: tuple[Host, WarmWorkers], warm: WarmWorkers, data_plane: DataPlane
) -> None:
    trained, plan = job(data_plane), plan_of(1)
    host, there = far
    with Director(warm, trained, address=host.near) as cluster:
        cluster.start("a")
        cluster.start("b", at=(there, host.far))
        card = cluster.workers[BOTH[1]].card
        with overheard(host.interface) as packets:
            cluster.assign(plan)
            cluster.wait_finished(plan)
            cluster.stop()
        assert cluster.losses() == pytest.approx(losses_of(trained), rel=1e-12)
    heard = b"".join(packets)
    assert len(heard) > 100_000
    assert (card.encode() in heard) == (data_plane == "clear")

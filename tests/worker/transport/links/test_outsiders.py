"""Links outlive meetings, and so does that of a worker which no later plan has: nothing it says
counts in a meeting whose secret it was not given."""

import pytest
import torch

from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.greeting import prove_member
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Early, Incoming
from oobleck.worker.transport.links.wire import Kind, Label
from oobleck.worker.transport.meeting import _CARD, _MEETING
from oobleck.worker.transport.tree import entry
from support.meeting import SECRET, Party
from support.waiting import until

#: Of the meeting that the third is not in.
LATER = b"l" * 32
LABEL = Label(Kind.MESSAGE, 7, 0)


def say(outsider: Links, to: Links, label: Label, content: bytes) -> None:
    """In that meeting, over the link from before; what is said next comes behind it."""
    with outsider.lock:
        link = outsider._links[to.identity]
        frame = outsider._write(link, 2, label, memoryview(content))
        outsider.press(+1)  # writes while nobody waits
    until(lambda: frame.done, "it has gone out")
    with outsider.lock:
        outsider.press(-1)


def standing_of(outsider: Links, to: Links, secret: bytes) -> bytes:
    """As if it were the rank 1."""
    card = outsider.card.text.encode()
    said = entry(1, _CARD.pack(len(card)) + card + b"false")
    return prove_member(secret, 2, outsider.identity, to.identity, said) + said


@pytest.mark.parametrize("early", [True, False], ids=["before it", "amid it"])
@pytest.mark.parametrize("secret", [SECRET, bytes(32)], ids=["of before", "none"])
def test_who_has_not_its_secret_is_not_counted_in_a_meeting(secret: bytes, early: bool) -> None:
    with Party(3) as party:
        party.meet()
        host, other, outsider = party.links

        def forge() -> None:
            say(outsider, host, Label(Kind.STANDING, 0, 0), standing_of(outsider, host, secret))
            for each in (host, other):
                say(outsider, each, Label(Kind.TABLE, _MEETING, 0), b"false")
                say(outsider, each, Label(Kind.CALLED_OFF, 0, 0), b"")

        if early:
            forge()
        there = [LinkTransport(each, 2, LATER, rank, 2) for rank, each in enumerate((host, other))]
        if not early:
            forge()
        party.transports = there
        heard = party.everywhere(
            lambda t: t.meet(host.card, {1 - t.rank}, b"%d" % t.rank, lambda: None)
        )
        assert heard == [[b"0", b"1"]] * 2
        assert [each.others for each in there] == [{other.identity}, {host.identity}]
        # What it says there goes nowhere, nor is it kept.
        kept = host._links[outsider.identity]
        for number in range(100):
            say(outsider, host, Label(Kind.MESSAGE, number, 0), bytes(1000))
        here = torch.zeros(1)
        say(outsider, host, LABEL, bytes(torch.full((1,), 666.0).view(torch.uint8).tolist()))
        arriving = there[0].receive(here, 1, LABEL.key)
        there[1].send(torch.ones(1), 0, LABEL.key).wait()
        arriving.wait()
        assert here.tolist() == [1.0]
        say(outsider, host, Label(Kind.GOODBYE, 0, 0), b"")
        until(lambda: there[0].links.has_left(outsider.identity) or host.wake(), "all is read")
        assert not kept._early


class Feeding:
    epoch = 2

    def __init__(self) -> None:
        self.fed: list[bytes] = []
        self.frames: list[Early] = []

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        self.fed.append(peer)
        self.frames.append(Early())
        return self.frames[-1]

    def cut(self, peer: bytes) -> None:
        pass


@pytest.mark.parametrize("secret", [None, SECRET, LATER], ids=["none", "of before", "right"])
@pytest.mark.parametrize("late", [False, True], ids=["expected", "before it is expected"])
def test_only_who_has_its_secret_feeds_for_a_coming_meeting(
    secret: bytes | None, late: bool
) -> None:
    with Party(2) as party:
        party.meet()
        taker, giver = party.links
        feeding = Feeding()

        def prove() -> None:
            if secret is not None:
                proof = prove_member(secret, 2, giver.identity, taker.identity)
                say(giver, taker, Label(Kind.PROOF, 0, 0), proof)

        if late:
            prove()
        with taker.lock:
            taker.press(+1)  # reads while nobody waits
        until(
            lambda: not late or secret is None or taker._links[giver.identity].claim, "it is heard"
        )
        taker.expect(LATER, feeding)
        if not late:
            prove()
        say(giver, taker, Label(Kind.FEED, 0, 0), b"state")
        say(giver, taker, Label(Kind.GOODBYE, 0, 0), b"")
        until(lambda: taker._attendance._left_ahead.get(2), "all is read")
        assert [bytes(each.content) for each in feeding.frames] == [b"state"] * (secret is LATER)


def test_the_proof_goes_ahead_of_what_is_fed_over_any_link() -> None:
    with Party(2) as party:
        party.meet()
        taker, giver = party.links
        at_taker, at_giver = Feeding(), Feeding()
        taker.expect(LATER, at_taker)
        giver.expect(LATER, at_giver)
        for _ in range(2):
            with giver.lock:
                giver.send_ahead(at_giver, taker.identity, Label(Kind.FEED, 0, 0), memoryview(b"1"))
        until(lambda: at_taker.fed == [giver.identity] * 2, "it is fed")

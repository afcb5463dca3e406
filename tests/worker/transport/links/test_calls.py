"""Calls while meetings follow each other: one that was made for another meeting than the present is
never in the way of it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links import hub
from oobleck.worker.transport.links.door import Door
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming
from oobleck.worker.transport.links.wire import Label
from support.meeting import SECRET, Party
from support.waiting import until

LATER = b"l" * 32


class Coming:
    """A meeting that is prepared, for which nothing is fed."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        return None

    def cut(self, peer: bytes) -> None:
        pass


def ordered(party: Party) -> tuple[Links, Links]:
    """The larger identity first, whose calls stand."""
    one, other = party.links
    return (one, other) if one.identity > other.identity else (other, one)


@contextmanager
def deaf(monkeypatch: pytest.MonkeyPatch, links: Links) -> Iterator[None]:
    """A busy host's: what callers say behind their first word is not read for a while."""
    listen_to = Door._listen_to

    def overlook(door: Door, guest: object) -> bool:
        if door is links._door and guest.own is not None:  # type: ignore[attr-defined]  # private
            return False
        return listen_to(door, guest)  # type: ignore[arg-type]  # private

    with monkeypatch.context() as patched:
        patched.setattr(Door, "_listen_to", overlook)
        yield


@pytest.mark.parametrize("expected", [False, True], ids=["present", "expected"])
def test_a_call_that_was_confirmed_for_a_meeting_that_is_over_makes_way_for_the_next(
    monkeypatch: pytest.MonkeyPatch, expected: bool
) -> None:
    """Its other end does not let it in any more. `expected`: it was made for a coming meeting,
    which was dropped."""
    with Party(2) as party:
        here, there = ordered(party)
        members = [
            LinkTransport(each, 1, SECRET, rank, 2) for rank, each in enumerate([there, here])
        ]
        epoch = 1
        if expected:
            epoch = 2
            comings = [Coming(2), Coming(2)]
            for links, coming in zip((here, there), comings, strict=True):
                links.expect(LATER, coming)
        with deaf(monkeypatch, there):
            here.connect([there.card], epoch)
            until(lambda: here.call_to(there.identity).confirmed, "it is confirmed")
            if expected:
                for links, coming in zip((here, there), comings, strict=True):
                    links.call_off(coming)
            for each in members:
                each.abort()
            members = [
                LinkTransport(each, 3, b"3" * 32, rank, 2)
                for rank, each in enumerate([there, here])
            ]
        party.transports = members
        party.everywhere(lambda t: t.meet(there.card, {1 - t.rank}, b"", lambda: None))
        assert party.everywhere(lambda t: t.gather(b"%d" % t.rank)) == [[b"0", b"1"]] * 2


def test_a_call_for_a_coming_meeting_is_not_in_the_way_of_one_for_the_present() -> None:
    """Whoever is called for the coming one has not heard of it."""
    with Party(2) as party:
        here, there = ordered(party)
        for links in (here, there):
            LinkTransport(links, 1, SECRET, 0, 2)
        here.expect(LATER, Coming(2))
        here.connect([there.card], 2)
        until(lambda: there._door._guests, "it is called")
        there.connect([here.card])
        until(lambda: there.linked(here.identity) and here.linked(there.identity), "a link")
        assert here.call_to(there.identity) is None


def test_a_call_for_the_present_meeting_takes_the_place_of_one_for_a_coming_and_is_kept() -> None:
    with Party(2) as party:
        here, there = ordered(party)
        LinkTransport(here, 1, SECRET, 0, 2)
        here.expect(LATER, Coming(2))
        for epoch in (2, 1, 2):
            here.connect([there.card], epoch)
            until(lambda: there._door._guests, "it is called")
        call = here.call_to(there.identity)
        assert call is not None
        assert (call.epoch, call.then) == (1, 2)
        LinkTransport(here, 2, LATER, 0, 2)  # of which nobody calls anew
        LinkTransport(there, 2, LATER, 1, 2)
        until(lambda: there.linked(here.identity), "a link for the coming one")


def test_meetings_that_are_superseded_at_any_moment_do_not_disturb_the_next() -> None:
    for round_ in range(30):
        with Party(3) as party:

            def come(transport: LinkTransport, late_s: float = round_ % 10 / 1e3) -> list[bytes]:
                abrupt = threading.Timer(late_s, transport.abort)
                abrupt.start()
                whom = {0, 1, 2} - {transport.rank}
                try:
                    transport.meet(party.links[0].card, whom, b"", lambda: None)
                    time.sleep(late_s)
                except TransportError:
                    pass
                abrupt.join()
                after = LinkTransport(transport.links, 2, LATER, transport.rank, 3)
                after.meet(party.links[0].card, whom, b"", lambda: None)
                return after.gather(b"%d" % transport.rank)

            party.transports = [
                LinkTransport(each, 1, SECRET, rank, 3) for rank, each in enumerate(party.links)
            ]
            assert party.everywhere(come) == [[b"0", b"1", b"2"]] * 3


def test_a_link_that_cannot_be_made_here_is_one_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an epoll takes no more; the links' thread goes on."""
    with Party(3) as party:
        party.meet(near=lambda rank, size: set())
        _, called, caller = party.links
        make = hub.Link

        def make_badly(peer: bytes, *rest: object) -> object:
            if peer == caller.identity:
                raise OSError(28, "No space left on device")
            return make(peer, *rest)  # type: ignore[arg-type]  # handed on

        with monkeypatch.context() as patched:
            patched.setattr(hub, "Link", make_badly)
            caller.connect([called.card])
            until(lambda: not caller.call_to(called.identity), "the caller has a link")
            until(lambda: called.identity not in caller.peers, "which ends")
        party.meet()
        assert party.heard == [[b"0", b"1", b"2"]] * 3

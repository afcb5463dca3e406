"""Coming to a meeting: all hear what all have to say, in one exchange, along a tree where there are
many; and whatever happens amid it, nobody waits for ever and nobody goes on alone."""

import threading

import pytest
import torch

from oobleck.core.ids import Generation
from oobleck.worker.runtime.errors import CalledOff, Superseded, TransportError
from oobleck.worker.transport import tree
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.link import Link, Outgoing
from oobleck.worker.transport.links.wire import Label
from oobleck.worker.transport.tree import place_of, tree_neighbours
from support.meeting import SECRET, Party
from support.waiting import until

FAN_OUT = 3


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of several levels of few."""
    monkeypatch.setattr(tree, "FAN_OUT", FAN_OUT)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12, 40])
def test_everyone_has_one_place_in_the_tree(narrow: None, size: int) -> None:
    for root in {0, 1 % size, size - 1}:
        places = {rank: place_of(rank, size, root) for rank in range(size)}
        assert [rank for rank, place in places.items() if place.above is None] == [root]
        below = [rank for place in places.values() for rank in place.below]
        assert sorted([*below, root]) == list(range(size))
        for rank, place in places.items():
            assert len(place.below) <= FAN_OUT
            assert all(places[each].above == rank for each in place.below)


@pytest.mark.parametrize("host", [0, 4, 16])
@pytest.mark.parametrize("along_tree", [True, False], ids=["tree", "star"])
def test_all_hear_what_all_say_in_two_messages_for_each_but_one(
    narrow: None, monkeypatch: pytest.MonkeyPatch, along_tree: bool, host: int
) -> None:
    count, sent = 17, 0
    send = Link.send

    def counted(link: Link, *frame: object) -> object:
        nonlocal sent
        sent += 1
        return send(link, *frame)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr(Link, "send", counted)
    with Party(count) as party:
        party.meet(lambda rank, size: set(), host=host, along_tree=along_tree)
        assert party.heard == [[b"%d" % rank for rank in range(count)]] * count
        assert sent == 2 * (count - 1)
        most = max(len(each.peers) for each in party.links)
        assert most == (FAN_OUT + 1 if along_tree else count - 1)


def test_a_second_meeting_along_the_tree_makes_no_connection(narrow: None) -> None:
    with Party(10) as party:
        for _ in range(3):
            party.meet(tree_neighbours, along_tree=True)
            links = [set(each._links.values()) for each in party.links]
        party.meet(tree_neighbours, along_tree=True)
        assert [set(each._links.values()) for each in party.links] == links


class Dies(Exception):
    """As a process does: its links close without a word."""


class Drill:
    """All come to a meeting along a tree, each in a thread, and one of them dies on the way."""

    def __init__(self, party: Party, epoch: int, victim: int) -> None:
        self._party, self._victim = party, victim
        self._cards = {rank: each.card for rank, each in enumerate(party.links)}
        self._epoch = epoch
        #: The victim dies as it waits for others.
        self.strike = threading.Event()
        self.ends: dict[int, str] = {}
        self._threads: list[threading.Thread] = []

    def come(self, *ranks: int) -> None:
        for rank in ranks:
            thread = threading.Thread(target=self._come, args=(rank,))
            self._threads.append(thread)
            thread.start()

    def _come(self, rank: int) -> None:
        links, cards = self._party.links[rank], self._cards
        transport = LinkTransport(links, self._epoch, SECRET, rank, len(cards))

        def check_newest() -> None:
            if rank == self._victim and self.strike.is_set():
                raise Dies

        try:
            transport.meet(cards[0], set(), b"", check_newest, cards)
            transport.gather(b"")  # whoever goes on needs the others
            self.ends[rank] = "met"
        except Dies:
            links.close()
            self.ends[rank] = "dead"
        except TransportError:
            transport.abort()  # as a worker does
            self.ends[rank] = "released"

    def all_ended(self) -> bool:
        for thread in self._threads:
            thread.join(60)
        return {*self.ends.values()} == {"dead", "released"}


@pytest.mark.parametrize("victim", [0, 1, 5], ids=["root", "between", "leaf"])
def test_a_death_amid_a_meeting_ends_it_for_all_and_the_others_meet_anew(
    narrow: None, victim: int
) -> None:
    """The last to come is waited for while it happens, and comes to a meeting that is over."""
    with Party(13) as party:
        party.meet(tree_neighbours, along_tree=True)
        drill = Drill(party, 2, victim)
        drill.come(*range(12))
        # Before, nobody of this meeting would miss it.
        above = party.links[place_of(victim, 13).above or 0]
        mine = party.links[victim].identity
        until(lambda: victim == 0 or mine in above._member.others, "it has come")  # type: ignore[union-attr]
        drill.strike.set()
        until(lambda: victim in drill.ends, "it is dead")
        drill.come(12)
        assert drill.all_ended()
        del party.links[victim]
        party._epoch = 2
        party.meet(tree_neighbours, along_tree=True)
        assert party.heard == [[b"%d" % rank for rank in range(12)]] * 12


def test_the_death_of_the_root_while_it_tells_all_lets_nobody_go_on(
    narrow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some have heard what all have said by then."""
    with Party(13) as party:
        party.meet(tree_neighbours, along_tree=True)
        root, told = party.links[0], 0
        send = root.send

        def die_amid(peer: bytes, label: Label, content: memoryview) -> Outgoing:
            nonlocal told
            told += 1
            if told == FAN_OUT:
                raise Dies
            return send(peer, label, content)

        monkeypatch.setattr(root, "send", die_amid)
        drill = Drill(party, 2, 0)
        drill.come(*range(13))
        assert drill.all_ended()
        assert told == FAN_OUT


def test_a_newer_plan_wins_over_a_meeting_along_a_tree(narrow: None) -> None:
    """One that waits for the others learns of it, and all of them hear so."""
    wanted = threading.Event()
    newer = Superseded(Generation(2))

    def check_newest() -> None:
        if wanted.is_set():
            raise newer

    with Party(13) as party:
        party.meet(tree_neighbours, along_tree=True)
        cards = {rank: each.card for rank, each in enumerate(party.links)}
        ends: dict[int, type[BaseException]] = {}

        def come(rank: int) -> None:
            transport = LinkTransport(party.links[rank], 2, SECRET, rank, 13)
            asks = check_newest if rank == 7 else lambda: None
            with pytest.raises((Superseded, CalledOff)) as caught:
                transport.meet(cards[0], set(), b"", asks, cards)
            ends[rank] = caught.type

        threads = [threading.Thread(target=come, args=(rank,)) for rank in range(12)]
        for thread in threads:
            thread.start()
        until(lambda: all(each._member for each in party.links[:12]), "all but one have come")
        wanted.set()
        for thread in threads:
            thread.join(60)
        assert ends == {rank: Superseded if rank == 7 else CalledOff for rank in range(12)}


def test_who_has_nothing_to_do_may_take_leave_before_others_have_their_links() -> None:
    with Party(3) as party:

        def near(rank: int, size: int) -> set[int]:
            return {1, 2} - {rank} if rank else set()

        go_on = threading.Event()
        linked = party.links[1].linked

        def late(peer: bytes) -> bool:
            if peer == party.links[2].identity:
                party.transports[0].stand_down()
                go_on.set()
            return linked(peer)

        party.links[1].linked = late  # type: ignore[method-assign]  # as if it came late
        party.meet(near)
        assert go_on.is_set()
        here, there = party.transports[1:]
        there.send(torch.ones(1), 1, 1).wait()
        here.receive(torch.zeros(1), 2, 1).wait()

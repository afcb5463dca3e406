"""Links live through meetings: what one leaves behind never gets into the next, and nothing is
closed but by a death."""

import random
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport import meeting
from oobleck.worker.transport.linked import LinkTransport, _key_of
from oobleck.worker.transport.links.calls import Calls, Dial
from oobleck.worker.transport.links.wire import Kind, Label, bytes_of
from oobleck.worker.transport.tree import Words, tree_neighbours
from support import meeting as parties
from support.leftovers import opened
from support.meeting import SECRET, Party
from support.waiting import until

#: More than the kernel keeps between two processes.
LARGE = 16 << 20


@pytest.fixture(autouse=True, params=[True, False], ids=["sealed", "clear"])
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parties, "SEALED", request.param)


def filled(size: int, value: float) -> torch.Tensor:
    return torch.full((size // 4,), value)


def first_of(tensor: torch.Tensor) -> float:
    return float(tensor[0])


def test_a_hundred_meetings_use_the_same_links() -> None:
    with Party(4) as party:
        party.meet()
        before, _ = opened()
        for _ in range(100):
            for transport in party.meet():
                transport.dispose()
        assert opened()[0] == before


def test_what_is_half_sent_is_drained_and_the_next_meeting_hears_only_its_own() -> None:
    with Party(2) as party:
        for number in range(6):
            here, there = party.meet()
            given_up = torch.zeros(LARGE // 4)
            sent = here.send(filled(LARGE, -1.0), 1, 7)
            arriving = there.receive(given_up, 0, 7)
            if number % 2:
                until(partial(first_of, given_up), "its begin has come", poll_s=0.0005)
            here.abort()
            there.abort()
            for pending in (sent, arriving):
                # All of it may have come just before.
                with suppress(TransportError):
                    pending.wait()
            given_up.zero_()
            here, there = party.meet()
            value = float(number)
            pending = here.send(filled(LARGE, value), 1, 7)
            got = torch.zeros(LARGE // 4)
            there.receive(got, 0, 7).wait()
            pending.wait()
            assert torch.equal(got, filled(LARGE, value))
            assert not given_up.count_nonzero(), "nobody may write there any more"


def test_who_leaves_releases_those_who_wait_for_it_and_nobody_takes_it_for_a_loss() -> None:
    lost: list[tuple[int, str]] = []
    with Party(3) as party:
        party.meet(on_lost=lambda rank, why: lost.append((rank, why)))

        def wait(transport: LinkTransport) -> str:
            if transport.rank == 0:
                time.sleep(0.1)
                transport.abort()
                return ""
            with pytest.raises(TransportError) as caught:
                transport.receive(torch.zeros(1), 0, 9).wait()
            return str(caught.value)

        assert party.everywhere(wait) == ["", *["rank 0 has left"] * 2]
        here, there, third = party.meet(on_lost=lambda rank, why: lost.append((rank, why)))
        here.stand_down()
        party.links[0].close()
        there.send(torch.ones(1), 2, 1).wait()
        third.receive(torch.zeros(1), 1, 1).wait()
        with pytest.raises(TransportError, match="has left"):
            there.receive(torch.zeros(1), 0, 1).wait()
        assert lost == []


def test_an_end_without_goodbye_is_told_to_all_at_once() -> None:
    lost: list[int] = []
    with Party(4) as party:
        party.meet(on_lost=lambda rank, why: lost.append(rank))
        party.links[2].close()
        until(lambda: sorted(lost) == [0, 1, 3], "all are told")
        for rank in (0, 1, 3):
            with pytest.raises(TransportError):
                party.transports[rank].all_reduce(torch.zeros(4), (0, 1, 2, 3)).wait()
        survivors = [party.links[rank] for rank in (0, 1, 3)]
        party.meet(members=survivors)
        sums = party.everywhere(lambda t: t.all_gather(torch.tensor([t.rank])))
        assert sums == [[torch.tensor([rank]) for rank in range(3)]] * 3


def test_two_that_call_each_other_at_once_get_one_link() -> None:
    for _ in range(20):
        with Party(2) as party:
            party.meet(near=lambda rank, size: set())

            def talk(transport: LinkTransport) -> float:
                peer = 1 - transport.rank
                sent = transport.send(torch.full((3,), float(transport.rank)), peer, 1)
                got = torch.zeros(3)
                transport.receive(got, peer, 1).wait()
                sent.wait()
                return float(got[0])

            assert party.everywhere(talk) == [1.0, 0.0]
            assert [len(each.peers) for each in party.links] == [1, 1]


def test_one_that_is_not_called_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.1)
    with Party(3) as party:
        larger = max((1, 2), key=lambda rank: party.links[rank].identity)
        party.meet(near=lambda rank, size: set() if rank == larger else {0, larger} - {rank})
        assert len(party.links[larger].peers) == 2


def test_many_gather_along_a_tree() -> None:
    count = 70  # more than the root has hands
    with Party(count) as party:
        party.meet(near=tree_neighbours)
        words = party.everywhere(lambda transport: transport.gather(b"%d" % transport.rank))
        assert words == [[b"%d" % rank for rank in range(count)]] * count
        # The root of the tree hosts the meeting, and those below its hands have one above them too.
        ends = [len(each.peers) for each in party.links]
        assert sum(ends) == 2 * (count - 1 + len(tree_neighbours(1, count)) - 1)


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(each, marks=pytest.mark.soak) for each in range(20, 40))]
)
def test_sums_are_the_same_to_the_bit_on_all_and_in_the_order_of_ranks(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([2, 3, 5])
    group = tuple(sorted(draw.sample(range(size), draw.randint(2, size))))
    numbers = draw.choice([0, 1, 7, 16_384, 16_385, 700_001])
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
    parts = [torch.randn(numbers).to(dtype) for _ in range(size)]
    expected = parts[group[0]].clone()
    for rank in group[1:]:
        expected += parts[rank]

    shares = [list(torch.split(part, draw.choice([1_000_000, 9_999]))) for part in parts]
    as_they_were = [part.clone() for part in parts]
    apart = draw.choice([True, False])

    def add(transport: LinkTransport) -> bool:
        rank = transport.rank
        if rank not in group:
            return True
        tensor = torch.full_like(parts[rank], torch.nan) if apart else parts[rank]
        transport.all_reduce(tensor, group, shares[rank] if apart else ()).wait()
        unchanged = torch.equal(parts[rank], as_they_were[rank]) or not apart
        return torch.equal(tensor, expected) and unchanged

    with Party(size, sealed=draw.choice([True, False])) as party:
        party.meet()
        assert party.everywhere(add) == [True] * size


def test_sums_go_on_while_the_workers_do_something_else() -> None:
    """Nobody reads for a worker that does not wait but its links' own thread."""
    groups = [(0, 1, 2), (0, 1), (1, 2), (0, 2), (0, 1, 2)]
    with Party(3) as party:
        party.meet()

        def add(transport: LinkTransport) -> list[float]:
            own = [group for group in groups if transport.rank in group]
            tensors = [torch.ones(300_000) for _ in own]
            under_way = [transport.all_reduce(t, g) for t, g in zip(tensors, own, strict=True)]
            until(lambda: all(t[-1] > 1 and t[0] > 1 for t in tensors), "the sums, unasked")
            for each in under_way:
                each.wait()
            return [float(t.sum()) / 300_000 for t in tensors]

        assert party.everywhere(add) == [[3.0, 2.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize("numbers", [4, 3_000_000])
def test_a_death_amid_sums_ends_them_everywhere_and_the_others_sum_on(numbers: int) -> None:
    with Party(5) as party:
        while len(party.links) > 2:
            party.meet()
            victim = len(party.links) // 2

            def add(transport: LinkTransport, victim: int = victim) -> str:
                group = tuple(range(transport.size))
                try:
                    for turn in range(1000):
                        tensor = torch.ones(numbers)
                        transport.all_reduce(tensor, group).wait()
                        assert tensor[0] == tensor[-1] == transport.size
                        if transport.rank == victim and turn == 3:
                            transport.links.close()
                            return "dead"
                except TransportError:
                    return "released"
                return "never"

            ends = party.everywhere(add)
            assert ends.pop(victim) == "dead"
            assert set(ends) == {"released"}
            del party.links[victim]


def test_tensors_without_numbers_are_sent_gathered_and_told_as_any_other() -> None:
    with Party(2) as party:
        here, there = party.meet()
        sends = [here.send(torch.zeros(0), 1, 1), here.send(torch.ones(1), 1, 2)]
        late = torch.zeros(1)
        there.receive(late, 0, 2).wait()  # so what came before it is there already
        there.receive(torch.zeros(0), 0, 1).wait()
        waiting = there.receive(torch.zeros(2, 0), 0, 3)
        here.send(torch.zeros(2, 0), 1, 3).wait()
        waiting.wait()
        for each in sends:
            each.wait()
        empty = torch.zeros(3, 0, dtype=torch.int64)
        gathered = party.everywhere(lambda transport: transport.all_gather(empty))
        assert [[part.shape for part in parts] for parts in gathered] == [[(3, 0)] * 2] * 2
        party.everywhere(lambda transport: transport.broadcast(torch.zeros(0), 1))


@pytest.mark.parametrize("ends", [False, True], ids=["that stays", "that ends"])
def test_a_message_to_one_that_has_left_is_not_waited_for(ends: bool) -> None:
    """It does not read any more, and its end is no loss that would release the wait."""
    with Party(2) as party:
        here, there = party.meet()
        sent = here.send(filled(LARGE, 1.0), 1, 7)
        there.stand_down()
        if ends:
            party.links[1].close()
        with pytest.raises(TransportError, match="has left"):
            sent.wait()


@pytest.mark.parametrize("ends", [False, True], ids=["that stays", "that ends"])
def test_a_sum_for_which_all_is_there_ends_though_one_has_left(ends: bool) -> None:
    group = (0, 1, 2)
    part = torch.ones(100)
    with Party(3) as party:
        adds, leaves, hears = party.meet()

        def share(transport: LinkTransport) -> None:
            """Of the one chunk, which is added up by the first."""
            label = Label(Kind.SHARE, _key_of(group, 0), 0)
            with transport.links.lock:
                sent = transport.links.send(adds.links.identity, label, bytes_of(part))
            transport.links.wait(lambda: sent.done)

        total = torch.ones(100)
        adding = adds.all_reduce(total, group)
        adds.send(filled(LARGE, 1.0), 1, 7)  # the sum is behind it
        share(leaves)
        leaves.stand_down()
        if ends:
            party.links[1].close()
            until(lambda: len(adds.links.peers) == 1, "the end is seen")
        heard = Words()
        with hears.links.lock:
            hears.links.post(adds.links.identity, Label(Kind.TOTAL, _key_of(group, 0), 0), heard)
        share(hears)
        adding.wait()
        assert total.tolist() == [3.0] * 100
        assert hears.links.wait(heard.is_there, time.monotonic() + 20)


def test_who_calls_one_that_has_left_is_told_so() -> None:
    with Party(2) as party:
        here, there = party.meet(near=lambda rank, size: set())
        there.abort()
        with pytest.raises(TransportError, match="has left"):
            here.receive(torch.zeros(1), 1, 1).wait()


def test_who_comes_to_a_host_that_has_given_up_is_told_so() -> None:
    with Party(2) as party:
        party.meet()
        host, late = (LinkTransport(each, 9, SECRET, r, 2) for r, each in enumerate(party.links))
        host.abort()
        with pytest.raises(TransportError, match="has left"):
            late.meet(party.links[0].card, set(), b"", lambda: None)


def test_what_went_over_a_link_that_the_other_end_had_given_up_is_not_lost_in_silence() -> None:
    """As when the way between two was cut for so long that one of them has noticed."""
    lost: list[int] = []
    with Party(3) as party:
        party.meet()
        links, peer = party.links[1], party.links[2].identity
        link = links._links[peer]
        with link.socket.dup():  # so the other end does not hear of it
            with links.lock:
                links.ended(link, TimeoutError())
            party.meet(near=lambda rank, size: set(), on_lost=lambda rank, why: lost.append(rank))
            _, knows, other = party.transports
            other.send(torch.ones(1), 1, 1).wait()
            knows.send(torch.ones(1), 2, 1).wait()
            until(lambda: lost == [2], "it is told")
        with pytest.raises(TransportError, match="called again"):
            other.receive(torch.zeros(1), 1, 2).wait()


def test_a_gathering_that_is_aborted_as_it_begins_takes_nothing_of_the_next_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Party(2) as party:
        here = party.meet()[0]
        with monkeypatch.context() as late:
            linked_ = here.links.linked

            def abort(peer: bytes) -> bool:
                """As another thread may, between a look and the next."""
                here.abort()
                return linked_(peer)

            late.setattr(here.links, "linked", abort)
            with pytest.raises(TransportError):
                here.gather(b"old")
        assert not any(link._posted for link in here.links._links.values())


def test_a_call_that_is_welcomed_as_its_meeting_ends_makes_a_link_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = threading.Event()
    advance = Calls._advance

    def overlook_welcome(calls: Calls, call: Dial) -> None:
        if entered.is_set() or not call.confirmed:
            advance(calls, call)

    with Party(3) as party:
        party.meet(near=lambda rank, size: set())
        monkeypatch.setattr(Calls, "_advance", overlook_welcome)
        _, here, there = party.links
        here.connect([there.card])
        until(lambda: there.linked(here.identity), "the called one has the link")
        opened_first = there._links[here.identity]
        party.meet(near=lambda rank, size: set())
        entered.set()
        until(lambda: here.linked(there.identity), "the caller has the link")
        assert there._links[here.identity] is opened_first

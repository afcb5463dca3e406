"""More workers than have links with all: what they vote and sum goes along trees, so the number of
links grows with theirs, and whoever dies amid it releases all."""

import random
from itertools import pairwise

import pytest
import torch

from oobleck.planner.programs.communicators import NO_WIRING, Wiring
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport import connect, tree
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.tree import ring_neighbours, sum_neighbours, tree_neighbours
from support.meeting import Party

FAN_OUT = MESHED = 3
COUNT = 13
EVERYONE = tuple(range(COUNT))
#: Of three workers more than are meshed, not in a row.
GROUP = (1, 4, 5, 7, 8, 12)


@pytest.fixture(autouse=True)
def few_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "FAN_OUT", FAN_OUT)
    for module in (tree, connect):
        monkeypatch.setattr(module, "MOST_MESHED", MESHED)


def near(rank: int, size: int) -> set[int]:
    return tree_neighbours(rank, size) | ring_neighbours(rank, size)


def links_of(party: Party) -> list[set[int]]:
    """To whom each has one, by rank."""
    ranks = {links.identity: rank for rank, links in enumerate(party.links)}
    return [{ranks[peer] for peer in links.peers} for links in party.links]


def vote(transport: LinkTransport) -> float:
    ballot = torch.full((3,), float(transport.rank))
    transport.all_reduce(ballot, EVERYONE).wait()
    return float(ballot[2])


def test_votes_and_sums_of_all_make_no_link() -> None:
    with Party(COUNT) as party:
        party.meet(near, along_tree=True)
        before = links_of(party)
        assert before == [near(rank, COUNT) for rank in EVERYONE]
        for _ in range(10):
            assert party.everywhere(vote) == [float(sum(EVERYONE))] * COUNT

        def add_much(transport: LinkTransport) -> list[float]:
            tensor = torch.full((100_000,), 1.0)
            transport.all_reduce(tensor, EVERYONE).wait()
            return tensor.unique().tolist()

        assert party.everywhere(add_much) == [[float(COUNT)]] * COUNT
        assert links_of(party) == before


def test_sums_of_a_large_group_make_links_along_it_alone() -> None:
    with Party(COUNT) as party:
        party.meet(tree_neighbours, along_tree=True)

        def add(transport: LinkTransport) -> None:
            for numbers in (4, 100_000):
                if transport.rank in GROUP:
                    transport.all_reduce(torch.ones(numbers), GROUP).wait()

        party.everywhere(add)
        expected = [tree_neighbours(rank, COUNT) for rank in EVERYONE]
        pairs = {*pairwise(GROUP)}
        for at, rank in enumerate(GROUP):
            pairs |= {(rank, GROUP[other]) for other in tree_neighbours(at, len(GROUP))}
        for one, other in pairs:
            expected[one].add(other)
            expected[other].add(one)
        assert links_of(party) == expected


@pytest.mark.parametrize("group", [GROUP[:3], GROUP, EVERYONE], ids=len)
def test_neighbours_in_sums_are_near(group: tuple[int, ...]) -> None:
    """So their links are there before the first sum, and with a coming plan."""
    connector = object.__new__(Connector)
    connector._board = ""  # nothing else is wanted of its device
    for at, rank in enumerate(group):
        found = {group[other] for other in sum_neighbours(at, len(group))}
        wiring = Wiring((("owners", group),))
        assert connector.near(rank, COUNT, wiring) == near(rank, COUNT) | found
        assert connector.near(rank, COUNT, NO_WIRING) == near(rank, COUNT)
        assert connector.near(0, MESHED, wiring) == {1, 2}


@pytest.mark.parametrize("size", [2, 3, 4, 13, 40])
def test_neighbours_in_sums_are_each_others_and_do_not_grow_with_the_group(size: int) -> None:
    found = [sum_neighbours(index, size) for index in range(size)]
    for one, others in enumerate(found):
        assert all(one in found[other] for other in others)
        assert len(others) <= FAN_OUT + 1 + 2


@pytest.mark.parametrize("seed", range(12))
def test_sums_of_many_are_the_same_to_the_bit_on_all_and_each_time(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([4, 5, COUNT])
    numbers = draw.choice([1, 16_384, 16_385, 200_001])
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
    parts = [torch.randn(numbers).to(dtype) for _ in range(size)]
    group = tuple(range(size))

    def add(transport: LinkTransport) -> torch.Tensor:
        part = parts[transport.rank]
        if transport.rank % 2:  # one's own way to say what it adds is nobody else's matter
            tensor = torch.full_like(part, torch.nan)
            transport.all_reduce(tensor, group, torch.split(part, 700)).wait()
        else:
            tensor = part.clone()
            transport.all_reduce(tensor, group).wait()
        return tensor

    with Party(size) as party:
        party.meet(near)
        first, *others = [*party.everywhere(add), *party.everywhere(add)]
        assert all(torch.equal(first, other) for other in others)
    exact = torch.stack([part.double() for part in parts]).sum(0)
    largest = torch.stack([part.double().abs() for part in parts]).sum(0)
    assert ((first.double() - exact).abs() <= size * torch.finfo(dtype).eps * largest).all()


@pytest.mark.parametrize("numbers", [4, 300_000], ids=["tree", "chain"])
@pytest.mark.parametrize("victim", [0, 1, COUNT - 1], ids=["root", "between", "leaf"])
def test_a_death_amid_sums_of_many_releases_all_and_the_others_sum_on(
    victim: int, numbers: int
) -> None:
    with Party(COUNT) as party:
        party.meet(near)

        def add(transport: LinkTransport) -> str:
            group = tuple(range(transport.size))
            try:
                for turn in range(1000):
                    tensor = torch.ones(numbers)
                    summing = transport.all_reduce(tensor, group)
                    if transport.rank == victim and turn == 3:
                        transport.links.close()
                        return "dead"
                    summing.wait()
                    assert tensor[0] == tensor[-1] == COUNT
            except TransportError:
                transport.abort()  # as a worker does
                return "released"
            return "never"

        ends = party.everywhere(add)
        assert ends.pop(victim) == "dead"
        assert set(ends) == {"released"}
        del party.links[victim]
        party.meet(near)

        def again(transport: LinkTransport) -> float:
            tensor = torch.ones(numbers)
            transport.all_reduce(tensor, tuple(range(transport.size))).wait()
            return float(tensor[-1])

        assert party.everywhere(again) == [COUNT - 1.0] * (COUNT - 1)

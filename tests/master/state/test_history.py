"""Terms of a journal, and what two heads of one history share."""

import pytest

from oobleck.master.state.cluster import GENERATIONS_PER_TERM, History, Start, Term
from oobleck.master.state.job import MOST_GENERATION
from oobleck.proto.assignments import MOST_TERM
from oobleck.proto.types import Head

A, B, C = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def head(
    term: int,
    begun_by: str = A,
    sequence: int = 50,
    history: str = "11" * 8,
    start: str = "00000001",
) -> Head:
    return Head(
        cluster=A, history=history, term=term, begun_by=begun_by, start=start, sequence=sequence
    )


@pytest.mark.parametrize(
    ("other", "outranked"),
    [
        (head(2), False),
        (head(2, sequence=1), False),
        (head(1, B), True),
        (head(2, B), True),
        (head(3, B), False),
        (head(1, B, history="22" * 8), False),
    ],
)
def test_an_agent_follows_no_earlier_term_nor_another_heads_same_one(
    other: Head, outranked: bool
) -> None:
    assert head(2).outranks(other) == outranked


def terms(*since: tuple[int, str, int]) -> History:
    found = [
        Term(number=number, begun_by=begun_by, place="here", since=first)
        for number, begun_by, first in since
    ]
    return History(id="11" * 8, cluster=A, terms=found)


def written(*starts: tuple[str, int], term: int = 2) -> History:
    """The second term began with the second start."""
    history = terms((1, A, 2), (term, B, 100))
    history.starts = [Start(id=start, since=since) for start, since in starts]
    return history


@pytest.mark.parametrize(
    ("other", "shared", "lacks"),
    [
        (head(2, B, 130, start="00000002"), 130, 0),  # it is behind this one
        (head(2, B, 170, start="00000002"), 150, 20),  # and this one behind it
        (head(1, A, 90), 90, 0),
        (head(1, A, 140), 99, 41),  # the second start began with event 100
        (head(2, C, 140, start="0000000c"), 99, 41),  # another head has a second term, too
        (head(2, B, 140, start="0000000c"), 99, 41),  # the disk has lost a start
        (head(2, B, 60, start="0000000c"), 99, 1),
        (head(1, A, 10, history="22" * 8), -1, 11),
    ],
)
def test_two_heads_share_the_starts_that_both_know(other: Head, shared: int, lacks: int) -> None:
    history = written(("00000001", 1), ("00000002", 100))
    assert (history.shared(other, 150), history.lacks(other, 150)) == (shared, lacks)


def test_a_start_that_is_not_known_shares_nothing_with_the_newest() -> None:
    """However often a head has started since its directory was put back."""
    history = written(("00000001", 1), ("00000002", 100), ("00000003", 120))
    lost = head(2, B, 130, start="0000000c")
    assert history.shared(lost, 150) == 119
    assert history.lacks(head(1, A, 101), 150) == 2


def test_starts_are_remembered_up_to_a_bound() -> None:
    history = History()
    for number in range(1000):
        history.start(f"{number:08x}", number + 1)
    assert len(history.starts) < 1000
    assert history.starts[-1] == Start(id=f"{999:08x}", since=1000)


def test_a_terms_generations_are_above_those_of_all_before() -> None:
    assert terms((1, A, 2)).first_generation == 0
    assert terms((1, A, 2), (3, B, 100)).first_generation == 2 * GENERATIONS_PER_TERM


def test_a_term_begins_above_all_that_are_known_up_to_a_bound() -> None:
    history = terms((1, A, 2), (4, B, 100))
    assert (history.next_number(), history.next_number(above=7)) == (5, 8)
    assert terms((MOST_TERM - 1, A, 2)).next_number(above=MOST_TERM) == MOST_TERM


def test_a_term_that_no_head_can_have_begun_uses_up_none() -> None:
    history = terms((1, A, 2), (4, B, 100))
    assert history.next_number(above=MOST_TERM - 1) == 5


def test_the_generations_of_all_terms_are_such_as_a_head_believes() -> None:
    assert terms((MOST_TERM, A, 2)).first_generation + GENERATIONS_PER_TERM < MOST_GENERATION

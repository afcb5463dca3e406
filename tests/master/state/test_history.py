"""Terms of a journal, and what two heads of one history share."""

import pytest

from oobleck.master.state.history import GENERATIONS_PER_TERM, History, Term
from oobleck.master.state.job import MOST_GENERATION
from oobleck.proto.heads import MOST_TERM
from oobleck.proto.types import Head

A, B, C = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def head(term: int, begun_by: str = A, sequence: int = 50, history: str = "11" * 8) -> Head:
    return Head(cluster=A, history=history, term=term, begun_by=begun_by, sequence=sequence)


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


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (head(2, B, sequence=130), 130),  # it is behind this one
        (head(2, B, sequence=170), 150),  # and this one behind it
        (head(1, A, sequence=90), 90),
        (head(1, A, sequence=140), 99),  # the second term began with event 100
        (head(2, C, sequence=140), 99),  # another head began a second term, too
        (head(3, C, sequence=900), 150),
        (head(1, A, sequence=10, history="22" * 8), -1),
    ],
)
def test_two_heads_share_what_came_before_the_later_ones_term(other: Head, shared: int) -> None:
    assert terms((1, A, 2), (2, B, 100)).shared(other, 150) == shared


def test_what_is_shared_with_a_copy_that_was_made_at_an_unknown_time() -> None:
    """The head of the second term went above a third, which it was never in."""
    history = terms((1, A, 2), (2, B, 100))
    history.terms.append(Term(number=4, begun_by=C, place="here", since=140, apart=100))
    assert history.shared(head(2, B, sequence=130), 150) == 130
    assert history.shared(head(3, A, sequence=130), 150) == 99


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

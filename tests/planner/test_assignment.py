"""The assignment problem against all permutations."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner.assignment import best_assignment

tables = st.integers(1, 5).flatmap(
    lambda columns: st.lists(
        st.lists(st.integers(0, 6), min_size=columns, max_size=columns), max_size=columns
    )
)


@given(gains=tables)
def test_no_permutation_gains_more(gains: list[list[int]]) -> None:
    chosen = best_assignment(gains)
    assert len(set(chosen)) == len(gains)
    columns = range(len(gains[0])) if gains else range(0)
    best = max(
        sum(row[column] for row, column in zip(gains, order, strict=True))
        for order in itertools.permutations(columns, len(gains))
    )
    assert sum(row[column] for row, column in zip(gains, chosen, strict=True)) == best


def test_more_rows_than_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows do not fit 1 columns"):
        best_assignment([[1], [1]])

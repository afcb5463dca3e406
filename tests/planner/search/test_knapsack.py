"""Exactly p items of exactly N size: against all selections."""

import itertools
import random

import pytest

from oobleck.planner.search import sizesearch
from oobleck.planner.search.sizesearch import Kind, select


def most_worth(kinds: list[Kind], items: int, size: int) -> int | None:
    """Of all selections; None: there is none of that size."""
    worths = [
        sum(kind.value for kind in chosen)
        for chosen in itertools.combinations_with_replacement(kinds, items)
        if sum(kind.size for kind in chosen) == size
    ]
    return max(worths, default=None)


def random_kinds(rng: random.Random) -> list[Kind]:
    sizes = sorted(rng.sample(range(1, 16), rng.randint(1, 6)))
    return [Kind(size, rng.randint(1, 30) + size * rng.choice([0, 3])) for size in sizes]


def check(kinds: list[Kind], items: int, size: int, worth: int, sizes: tuple[int, ...]) -> None:
    value = {kind.size: kind.value for kind in kinds}
    assert len(sizes) == items
    assert sum(sizes) == size
    assert sum(value[s] for s in sizes) >= worth


@pytest.mark.parametrize("seed", range(30))
def test_selections_are_found_exactly_where_there_are_any(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        kinds, items = random_kinds(rng), rng.randint(1, 5)
        size = rng.randint(items * kinds[0].size, items * kinds[-1].size)
        best = most_worth(kinds, items, size)
        for worth in (1, best or 1, (best or 0) + 1):
            selection = select(kinds, items=items, size=size, worth=worth)
            if best is None or worth > best:
                assert selection is None
            else:
                assert selection is not None
                check(kinds, items, size, worth, selection)


def test_without_room_for_the_table_a_yes_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizesearch, "_TABLE_CELLS", 40)
    rng = random.Random(0)
    missed = 0
    for _ in range(1500):
        kinds, items = random_kinds(rng), rng.randint(2, 5)
        size = rng.randint(items * kinds[0].size, items * kinds[-1].size)
        best = most_worth(kinds, items, size)
        worth = (best or 1) + rng.randint(0, 1)
        selection = select(kinds, items=items, size=size, worth=worth)
        if selection is not None:
            check(kinds, items, size, worth, selection)
        elif best is not None and best >= worth:
            missed += 1
    assert missed < 100

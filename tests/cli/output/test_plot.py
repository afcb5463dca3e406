"""A plot in characters: what stands where."""

import pytest

from oobleck.cli.output.metrics import plot, row

#: Of a line from one corner to the other: the highest and the lowest dots of its ends.
FIRST_DOT, LAST_DOT = 0x2801, 0x2880


def drawn(points: list[tuple[int, float]], width: int = 40) -> list[str]:
    """The rows behind the labels."""
    return [line[13:] for line in plot(points, width=width).splitlines()]


@pytest.mark.parametrize("count", [2, 3, 50, 5000])
def test_a_line_that_falls_goes_from_corner_to_corner(count: int) -> None:
    rows = drawn([(step, -2.0 * step) for step in range(1, count + 1)])
    assert ord(rows[0][0]) & FIRST_DOT == FIRST_DOT
    assert ord(rows[-2][25]) & LAST_DOT == LAST_DOT
    assert rows[-1].split() == ["1", str(count)]
    # Without a hole: some dot in each column of characters.
    assert all(any(ord(row[i]) > 0x2800 for row in rows[:-1] if i < len(row)) for i in range(26))


def test_the_labels_are_the_highest_and_the_lowest() -> None:
    lines = plot([(5, 1.0), (6, 3.25), (7, -0.5)], width=60).splitlines()
    assert (lines[0].split()[0], lines[-2].split()[0]) == ("3.25", "-0.5")
    assert max(map(len, lines)) <= 60


def test_one_point_and_a_level_line_are_drawn() -> None:
    assert drawn([(9, 2.0)])[0] == chr(FIRST_DOT)
    assert len(drawn([(9, 2.0), (10, 2.0)])[0]) == 26


def test_a_step_that_was_skipped_has_no_loss_and_says_so() -> None:
    record = {"step": 3, "loss": None, "grad_norm": None, "tokens": 8, "skipped": True}
    assert row(record, evaluations=False).split()[:3] == ["3", "-", "-"]
    assert row(record, evaluations=False).endswith("skipped")

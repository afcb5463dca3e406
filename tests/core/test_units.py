"""Sizes as people read them."""

import pytest

from oobleck.core.units import enough_bytes, format_bytes, head, parse_bytes


@pytest.mark.parametrize(
    ("number", "shown", "enough"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1023 B"),
        (1024, "1.0 KiB", "1.0 KiB"),
        (1025, "1.0 KiB", "1.1 KiB"),
        (826137, "806.8 KiB", "806.8 KiB"),
        ((1 << 20) - 1, "1.0 MiB", "1.0 MiB"),
        (3 << 30, "3.0 GiB", "3.0 GiB"),
        ((3 << 30) + 1, "3.0 GiB", "3.1 GiB"),
        (5000 << 40, "5000.0 TiB", "5000.0 TiB"),
    ],
)
def test_a_size_in_its_largest_unit(number: int, shown: str, enough: str) -> None:
    assert (format_bytes(number), enough_bytes(number)) == (shown, enough)


def test_what_is_said_to_be_enough_is_so() -> None:
    for power in range(50):
        for number in (2**power - 1, 2**power, 2**power + 1, 3**power % 2**50, 10**power % 2**50):
            assert parse_bytes(enough_bytes(number)) >= number


def test_the_head_of_a_text_is_as_much_as_its_bytes_hold() -> None:
    assert head("short", 8) == "short"
    assert head("exactly8", 8) == "exactly8"
    assert head("longer than 8", 8) == "longe…"
    assert head("ééééé", 8) == "éé…"
    assert head("\ud800 a lone one", 10).encode()

"""Token files that are read as another type than theirs are told from those that are not."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from oobleck.host.token_file import DataError, Dtype, look_through

#: Vocabularies from a few letters to that of a large model.
VOCABULARIES = (40, 300, 50_257, 128_256, 262_144)


def ids(vocabulary: int, count: int = 300_000) -> NDArray[np.int64]:
    """Unlike often, as words are: the lowest most of all."""
    draws = np.random.default_rng(vocabulary)
    return np.minimum((vocabulary * draws.random(count) ** 3).astype(np.int64), vocabulary - 1)


def write(path: Path, values: NDArray[np.int64], dtype: Dtype) -> Path:
    values.astype(np.dtype(dtype).newbyteorder("<")).tofile(path)
    return path


@pytest.mark.parametrize("count", [64, 300_000])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_ids_of_32_bits_read_as_narrower_ones_are_told(
    vocabulary: int, count: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "t", ids(vocabulary, count), "uint32")
    doubt = look_through(path, "uint16")
    assert doubt.startswith(f"{path} does not look like uint16: in groups of 2 ids the high half")
    assert doubt.endswith("set dtype to uint32")
    assert look_through(path, "uint8").endswith("set dtype to uint32")
    assert look_through(path, "uint32") == ""


def test_ids_of_16_bits_read_as_wider_or_narrower_ones_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "t", ids(50_257), "uint16")
    assert look_through(path, "uint32").endswith("set dtype to uint16")
    small = write(tmp_path / "s", ids(2_000), "uint16")
    assert look_through(small, "uint8").endswith("set dtype to uint16")
    with pytest.raises(DataError, match=r"two ids of the file make one") as refusal:
        look_through(write(tmp_path / "f", ids(200), "uint16"), "uint32", 50_257)
    assert "set dtype to uint16" in str(refusal.value)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (4, "uint8"),
        (256, "uint8"),
        (4, "uint16"),
        (16, "uint16"),
        (300, "uint16"),
        (65_536, "uint16"),
    ],
)
def test_nothing_is_said_of_a_file_that_is_read_as_what_it_is(
    vocabulary: int, dtype: Dtype, tmp_path: Path
) -> None:
    for count in (0, 1, 40, 299_999, 300_000):
        path = write(tmp_path / f"{count}", ids(vocabulary, count), dtype)
        assert look_through(path, dtype, vocabulary) == ""
    text = tmp_path / "text"
    text.write_text("To be, or not to be, that is the question.\n" * 500)
    assert look_through(text, "uint8") == ""


def test_a_file_with_half_an_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"123")
    with pytest.raises(DataError, match=r"has 3 bytes, no whole number of uint16 ids"):
        look_through(tmp_path / "t", "uint16")

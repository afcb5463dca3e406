"""The versions that hosts have, and how they differ."""

from pathlib import Path

import pytest

from oobleck.host.versions import ENGINE, Versions, described, differences, installed, series


def test_what_is_installed_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "torch-2.12.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n")
    (tmp_path / "torch.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed().torch == "2.12.0"
    assert installed().engine == ENGINE


@pytest.mark.parametrize("text", [b"", b"Name: torch\n", b"Version: \xff\xfe\n"])
def test_damaged_metadata_take_nobody_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    broken = tmp_path / "torch-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_bytes(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed().torch == ""


@pytest.mark.parametrize(
    ("version", "expected"), [("2.13.1+cpu", "2.13"), ("2.13", "2.13"), ("2", "2"), ("", "")]
)
def test_a_series_is_the_first_two_numbers(version: str, expected: str) -> None:
    assert series(version) == expected


def test_only_what_differs_is_told() -> None:
    new, old = Versions(torch="2.13.0", python="3.11.7"), Versions(torch="2.12.0", python="3.11.7")
    assert differences([("n1", new), ("n2", new)]) == {}
    found = differences([("n3", new), ("n2", old), ("n1", new)])
    assert described(found) == "torch 2.12.0 on n2, 2.13.0 on n1, n3"
    assert described(differences([("n1", Versions()), ("n2", Versions(transformers="5.0"))])) == (
        "transformers 5.0 on n2, none on n1"
    )

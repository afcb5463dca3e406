"""Wheels of jobs on the master's disk: whole or not there, bounded, and gone with their jobs."""

import hashlib
import os
from pathlib import Path

import pytest

from oobleck.master.storage import code
from oobleck.master.storage.code import CodeFolder

DIGEST = hashlib.sha256(b"one two").hexdigest()


def put(folder: CodeFolder, *parts: bytes) -> str:
    with folder.receive() as coming:
        for part in parts:
            coming.add(part)
        return coming.keep()


def test_a_wheel_is_there_when_it_is_whole(tmp_path: Path) -> None:
    folder = CodeFolder(tmp_path / "code")
    assert not folder.has(DIGEST)
    assert folder.open(DIGEST) is None
    with folder.receive() as coming:
        coming.add(b"one ")
        assert not folder.has(DIGEST)
    assert os.listdir(tmp_path / "code") == [], "of one that breaks off nothing stays"
    assert put(folder, b"one ", b"two") == put(folder, b"one two") == DIGEST
    assert folder.has(DIGEST)
    with folder.open(DIGEST) or pytest.fail("it is there") as file:
        assert file.read() == b"one two"
    assert os.listdir(tmp_path / "code") == [f"{DIGEST}.whl"]


def test_wheels_are_bounded_each_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CodeFolder(tmp_path / "code")
    monkeypatch.setattr(code, "MOST_WHEEL_BYTES", 6)
    with pytest.raises(ValueError, match="more than 6 bytes; leave data out of it"):
        put(folder, b"one ", b"two")
    assert os.listdir(tmp_path / "code") == []
    monkeypatch.setattr(code, "_MOST_BYTES", 5)
    put(folder, b"1234")
    put(folder, b"5678")
    with pytest.raises(ValueError, match=r"the wheels of jobs have .* or cancel some"):
        put(folder, b"9")


def test_a_wheel_goes_when_no_job_names_it_but_not_before_its_job_can_come(tmp_path: Path) -> None:
    folder = CodeFolder(tmp_path / "code")
    folder.remove_all_but((), 1e10)  # there is none yet
    named, other = put(folder, b"one two"), put(folder, b"other")
    came = (tmp_path / "code" / f"{other}.whl").stat().st_mtime
    folder.remove_all_but({named}, came + 599)
    assert folder.has(other)
    folder.remove_all_but({named}, came + 10_000)
    assert (folder.has(named), folder.has(other)) == (True, False)
    folder.remove_all_but((), came + 20_000)
    assert not folder.has(named)

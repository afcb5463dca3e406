"""Folders that cannot be used, are full, or do not keep what is written; and data that differ."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from oobleck.core.orders import MARK, Place, Use
from oobleck.host.doctor.places import (
    PlaceFacts,
    conclude,
    look,
    marks_in,
    remove_marks,
    seen,
)

SAVED = Place(path="/s", use="checkpoints")
WELL = PlaceFacts(
    place=SAVED,
    at="/s",
    system="ext4",
    free_bytes=1 << 40,
    free_files=1 << 20,
    bytes_per_s=1e9,
    sync_s=1e-3,
)


def told(facts: PlaceFacts) -> list[tuple[str, str]]:
    bad = [finding for finding in conclude(facts) if finding.level != "pass"]
    assert all(finding.fix for finding in bad)
    return [(finding.check, finding.level) for finding in bad]


def of(**changes: object) -> list[tuple[str, str]]:
    return told(replace(WELL, **changes))


def at(path: Path | str, use: Use = "checkpoints", *, mark: str = "") -> PlaceFacts:
    return look(Place(path=str(path), use=use), gently=False, mark=mark)


def test_what_is_concluded() -> None:
    assert of() == []
    assert of(problem="cannot be written (read-only file system)") == [("folders", "fail")]
    assert of(free_bytes=1 << 29) == [("room", "warn")]
    assert of(free_bytes=1 << 20) == [("room", "fail")]
    assert of(free_files=100) == [("room", "warn")]
    assert of(free_files=0) == [("room", "fail")]
    assert of(free_files=None) == []
    assert of(system="tmpfs") == [("durable", "warn")]
    assert of(system="overlay") == [("durable", "warn")]
    assert of(options=("rw", "volatile")) == [("durable", "warn")]
    assert of(system="fuse.sshfs") == [("durable", "warn")]
    assert of(bytes_per_s=1e7) == [("disk", "slow")]
    assert of(bytes_per_s=None) == []
    journal = Place(path="/s", use="journal")
    assert of(sync_s=0.1) == []
    assert of(place=journal, sync_s=0.1) == [("disk", "slow")]
    assert of(place=Place(path="/s", use="own"), system="tmpfs") == []
    volume = {"system": "ext4", "volume": "/var/lib/kubelet/pods/x"}
    assert of(place=journal, **volume) == [("durable", "warn")]
    assert of(**volume) == [], "of others it is as it should be"
    assert of(place=journal, **{**volume, "system": "nfs4"}) == []


def test_a_disk_that_is_slow(tmp_path: Path) -> None:
    """Its fsync is what it is, but for a wait."""

    def slow(descriptor: int) -> None:
        os.fsync(descriptor)
        time.sleep(0.06)

    place = Place(path=str(tmp_path), use="journal")
    assert ("disk", "slow") in told(look(place, gently=True, mark="", sync=slow))


def test_a_folder_is_looked_at_where_it_will_be(tmp_path: Path) -> None:
    facts = at(tmp_path / "a" / "b", mark=f"{MARK}x-n1")
    assert (facts.at, facts.problem) == (str(tmp_path), "")
    assert facts.system
    assert facts.free_bytes > 0
    assert os.listdir(tmp_path) == [f"{MARK}x-n1"], "nothing else is left"
    assert seen(facts).at == str(tmp_path)
    file = tmp_path / "file"
    file.touch()
    assert at(file).problem == "is no folder"
    assert at("/nowhere/at/all").problem.startswith("does not exist")
    assert at("s3://bucket/saved").system == "remote"


def test_files_that_nodes_leave_for_each_other(tmp_path: Path) -> None:
    for node in ("n1", "n2"):
        at(tmp_path, mark=f"{MARK}abc-{node}")
    at(tmp_path, mark=f"{MARK}other-n1")
    # Data and a host's own folders are left alone.
    at(tmp_path, "own", mark=f"{MARK}abc-n3")
    (tmp_path / f"{MARK}abc-n4").symlink_to(tmp_path / "elsewhere")
    assert at(tmp_path, mark=f"{MARK}abc-n4").problem.startswith("cannot be written")
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / f"{MARK}abc-n4").unlink()
    assert marks_in(str(tmp_path), "abc") == ("n1", "n2")
    remove_marks(str(tmp_path), "abc", older_s=3600)
    assert os.listdir(tmp_path) == [f"{MARK}other-n1"]
    remove_marks(str(tmp_path), "abc", older_s=-1)
    assert os.listdir(tmp_path) == []


def test_data(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.bin"):
        (tmp_path / name).write_text(name)

    def digest(path: Path | str) -> tuple[int, str]:
        facts = at(path, "data")
        assert facts.problem == ""
        return facts.files, facts.digest

    texts, everything = digest(tmp_path / "*.txt"), digest(tmp_path)
    assert (texts[0], everything[0]) == (2, 3)
    assert digest(tmp_path / "*.txt") == texts
    (tmp_path / "b.txt").write_text("B.txt")
    assert digest(tmp_path / "*.txt") != texts
    assert at(tmp_path / "*.json", "data").problem == "has no file in it"
    assert at(tmp_path / "none", "data").problem == "no such file or directory"


def test_what_no_end_of_a_large_file_shows_is_not_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    first = at(path, "data")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    assert at(path, "data").digest != first.digest


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_folder_of_a_disk_that_a_pod_mounts_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of the disk").mkdir()
    (tmp_path / "state").mkdir()
    bind = ["mount", "--bind", str(tmp_path / "of the disk"), str(tmp_path / "state")]
    if (made := subprocess.run(bind, capture_output=True, text=True)).returncode:
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        assert at(tmp_path / "state", "journal").volume == ""
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
        assert at(tmp_path / "state", "journal").volume.endswith("of the disk")
    finally:
        subprocess.run(["umount", str(tmp_path / "state")], check=True)


def test_real_file_systems(tmp_path: Path) -> None:
    with mounted(tmp_path / "full", "size=1m"):
        (tmp_path / "full" / "rest").write_bytes(bytes((1 << 20) - (8 << 10)))
        found = told(at(tmp_path / "full"))
        assert ("room", "fail") in found
        assert ("durable", "warn") in found
    with mounted(tmp_path / "few", "size=200m,nr_inodes=5"):
        assert ("room", "fail") in told(at(tmp_path / "few"))
    with mounted(tmp_path / "read", "size=1m,ro"):
        facts = at(tmp_path / "read")
        assert told(facts) == [("folders", "fail")]
        (finding,) = conclude(facts)
        assert "read-only file system" in finding.what
        assert finding.fix.startswith("mount it for writing")

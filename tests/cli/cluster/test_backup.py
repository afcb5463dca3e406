"""`oobleck backup`: who may make one, what is in it, and what is none."""

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.host.storage.backup import read_file, read_summary
from oobleck.proto import control_pb2 as pb
from support.commands import end, refused, run
from support.operators_master import answering
from support.secured import Secured


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    running = Secured(tmp_path_factory.mktemp("secured"))
    yield running
    end(running.process)


def test_all_but_the_key_is_in_it_and_what_is_told_is_true(
    secured: Secured, tmp_path: Path
) -> None:
    (secured.folder / "state/profiles").mkdir(exist_ok=True)
    (secured.folder / "state/profiles/k.json").write_text("{}")
    logs = secured.folder / "state/jobs/demo-1/logs"
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "n1-0.log").write_text("a line\nhalf of a l")
    done = run("backup", str(tmp_path / "b"), "--master", secured.address)
    assert (done.returncode, done.stderr) == (0, "")
    summary = read_summary(tmp_path / "b")
    for name, expected in summary.files.items():
        assert sum(map(len, read_file(tmp_path / "b", name, expected))) == expected.bytes
    assert sorted(summary.files) == [
        "jobs/demo-1/logs/n1-0.log", "journal.log", "profiles/k.json",
    ]  # fmt: skip
    assert summary.cluster
    size = sum(file.bytes for file in summary.files.values())
    assert done.stdout == (
        f"{tmp_path / 'b'}: 3 files, {size / 2**20:.1f} MiB, up to event {summary.sequence}\n"
    )
    key = (secured.pki / "ca.key").read_bytes()
    there = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    assert len(there) == 4
    assert not [path for path in there if key in path.read_bytes()]
    assert {path.stat().st_mode & 0o777 for path in there} == {0o600}
    again = refused(run("backup", str(tmp_path / "b"), "--master", secured.address), 2)
    assert "is not empty; name an empty folder" in again


def test_output_may_be_left_out_and_the_authority_be_there(
    secured: Secured, tmp_path: Path
) -> None:
    flags = ("--no-logs", "--authority", "--master", secured.address)
    assert run("backup", str(tmp_path / "b"), *flags).returncode == 0
    summary = read_summary(tmp_path / "b")
    assert not [name for name in summary.files if "logs" in name]
    assert not summary.output
    assert (tmp_path / "b/pki/ca.key").read_bytes() == (secured.pki / "ca.key").read_bytes()
    assert {"pki/ca.key", "pki/operator/client.key"} <= set(summary.files)


def test_viewers_may_not_and_the_authority_is_for_its_own_user(
    secured: Secured, tmp_path: Path
) -> None:
    viewer = tmp_path / "viewer"
    made = run(
        *("pki", "issue", "--dir", str(secured.pki), "--role", "viewer", "eve"),
        *("--out", str(viewer)),
    )
    assert made.returncode == 0, made
    shown = ("--master", secured.address, "--credentials", str(viewer))
    line = refused(run("backup", str(tmp_path / "b"), *shown), 5)
    assert "viewer eve may not call Backup; operator may" in line
    with answering() as address:
        line = refused(run("backup", str(tmp_path / "c"), "--authority", "--master", address), 2)
    assert "run this as its user on its host" in line
    assert not (tmp_path / "c").exists()


def test_a_backup_that_is_cut_or_comes_damaged_is_none(tmp_path: Path) -> None:
    whole = hashlib.sha256(b"abc").hexdigest()
    end = pb.BackupPart(summary=json.dumps({"sequence": 1, "time": 1.0, "output": True}).encode())
    part = functools.partial(pb.BackupPart, path="journal.log", data=b"abc")
    cases = (
        ([part(sha256=whole)], "the master ended before the backup did"),
        ([part(sha256="0" * 64), end], "journal.log was damaged in transfer"),
        ([part(path="../escaped", sha256=whole), end], "'../escaped' is no file of a backup"),
        ([pb.BackupPart(data=b"abc"), end], "data outside any file"),
    )
    for number, (parts, why) in enumerate(cases):
        folder = tmp_path / str(number)
        with answering(Backup=lambda _, parts=parts: iter(parts)) as address:
            assert why in refused(run("backup", str(folder), "--master", address), 1)
        assert not (folder / "backup.json").exists()
    assert not (tmp_path / "escaped").exists()

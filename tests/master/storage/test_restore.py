"""A head goes on from a backup, or refuses it in one line and writes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleck.cli.client import MasterClient
from oobleck.cli.cluster.authority import make_authority
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security.credentials import read_credentials
from support import commands
from support.forked import run_forked
from support.jobs import job_text
from support.masters import master


def refused(*arguments: str | Path) -> str:
    """Run a master that is to refuse its flags, or what they name; returns its one line."""
    done = run_forked("oobleck-master", "--listen", "127.0.0.1:0", *map(str, arguments))
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `state`, with one job of a head with an authority, and two backups of it:
    `backup`, and `whole` with the authority."""
    folder = tmp_path_factory.mktemp("made")
    make_authority(folder / "state/pki", ())
    with master(folder / "state") as running:
        shown = ("--master", running.address, "--credentials", str(folder / "state/pki/operator"))
        credentials = read_credentials(folder / "state/pki/operator")
        with MasterClient(Endpoint(address=running.address, credentials=credentials)) as client:
            client.submit(job_text(), "r")
        for name, flags in (("backup", ()), ("whole", ("--authority",))):
            done = commands.run("backup", str(folder / name), *flags, *shown)
            assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture
def backup(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made / "backup", tmp_path / "backup"))


def test_a_head_goes_on_from_a_backup(made: Path, tmp_path: Path) -> None:
    state = tmp_path / "new"
    with master(state, "--restore", str(made / "whole")) as running:
        endpoint = Endpoint(
            address=running.address, credentials=read_credentials(state / "pki/operator")
        )
        with MasterClient(endpoint) as client:
            assert [job.job_id for job in client.jobs()] == ["demo-1"]
    assert "goes on from a backup, " in running.errors.read_text()
    assert (state / "pki/ca.key").stat().st_mode & 0o777 == 0o600
    with master(state):
        pass  # as its own, without the flag
    line = refused("--state-dir", state, "--restore", made / "whole")
    assert "is not empty (it has code" in line or "is not empty (it has j" in line
    assert "leave --restore out" in line


def test_the_authority_may_be_there_already(made: Path, tmp_path: Path) -> None:
    state = tmp_path / "new"
    shutil.copytree(made / "state/pki", state / "pki")
    with master(state, "--restore", str(made / "backup")):
        pass
    shutil.copytree(made / "state/pki", tmp_path / "elsewhere")
    with master(
        tmp_path / "other", "--pki", str(tmp_path / "elsewhere"), "--restore", str(made / "whole")
    ):
        pass
    assert not (tmp_path / "other/pki").exists()


def _cut(backup: Path) -> None:
    (backup / "backup.json").unlink()


def _shorten(backup: Path) -> None:
    path = backup / "journal.log"
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(backup: Path) -> None:
    with (backup / "jobs/demo-1/events.jsonl").open("a") as file:
        file.write("{}\n")


def _change(backup: Path) -> None:
    path = backup / "journal.log"
    path.write_bytes(path.read_bytes()[:-3] + b"x}\n")


def _lose(backup: Path) -> None:
    (backup / "jobs/demo-1/events.jsonl").unlink()


def _lead_out(backup: Path) -> None:
    path = backup / "backup.json"
    summary = json.loads(path.read_text())
    summary["files"]["jobs/../../escaped"] = {"bytes": 0, "sha256": ""}
    path.write_text(json.dumps(summary))


def _say_nonsense(backup: Path) -> None:
    (backup / "backup.json").write_text("{")


def _say_more(backup: Path) -> None:
    path = backup / "backup.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (_cut, "has no backup.json, so it is no backup or was cut"),
        (_shorten, "journal.log: has less than the"),
        (_lengthen, "events.jsonl: has more than the"),
        (_change, "journal.log: differs from backup.json"),
        (_lose, "events.jsonl: cannot be read (No such file or directory)"),
        (_lead_out, "'jobs/../../escaped' is no file of a backup"),
        (_say_nonsense, "backup.json: not a valid Summary"),
        (_say_more, "format 2 is of another release"),
    ],
)
def test_a_backup_that_is_not_whole_is_refused(
    made: Path, backup: Path, tmp_path: Path, harm: Callable[[Path], None], told: str
) -> None:
    harm(backup)
    options = ("--pki", made / "state/pki", "--restore", backup)
    line = refused("--state-dir", tmp_path / "new", *options)
    assert told in line
    assert line.endswith("; restore another backup")
    assert not (tmp_path / "new").exists()


def test_a_backup_of_another_cluster_is_refused(made: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "pki", ())
    for flags, why in (
        (("--pki", tmp_path / "pki"), "the authority here is another"),
        ((), "there is no authority here"),
    ):
        line = refused("--state-dir", tmp_path / "new", "--restore", made / "backup", *flags)
        assert why in line
        assert "copy the folder of that cluster's authority here" in line
        assert not (tmp_path / "new").exists()


def test_a_directory_that_is_not_empty_and_two_backups_are_refused(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/precious").touch()
    line = refused("--state-dir", tmp_path / "new", "--restore", made / "whole")
    assert "is not empty (it has precious)" in line
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["precious"]
    both = ("--restore", made / "whole") * 2
    assert "--restore: is there more than once" in refused("--state-dir", tmp_path / "2", *both)
    assert not (tmp_path / "2").exists()


def test_a_backup_is_no_state_directory(backup: Path) -> None:
    before = sorted(backup.rglob("*"))
    line = refused("--state-dir", backup)
    assert "is a backup, which a master would change: name another directory" in line
    assert f"--restore {backup}" in line
    line = refused("--state-dir", backup / "state", "--restore", backup)
    assert f"is inside the backup {backup}; choose one outside of it" in line
    assert sorted(backup.rglob("*")) == before


def test_a_restore_that_was_cut_off_begins_anew(made: Path, tmp_path: Path) -> None:
    state = tmp_path / "new"
    (state / "jobs/demo-1").mkdir(parents=True)
    (state / "jobs/demo-1/events.jsonl").write_text("half of i")
    (state / "pki").mkdir()
    (state / "pki/ca.key").write_text("half of i")
    (state / "restoring").write_text("pki")
    line = refused("--state-dir", state, "--pki", made / "state/pki")
    assert "its restore was cut off; start with --restore DIR again" in line
    with master(state, "--restore", str(made / "whole")):
        pass
    assert not (state / "restoring").exists()
    events = (state / "jobs/demo-1/events.jsonl").read_text()
    assert events.startswith((made / "whole/jobs/demo-1/events.jsonl").read_text())

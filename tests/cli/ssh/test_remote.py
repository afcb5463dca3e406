"""What `oobleck up` writes on hosts: the unit, made of deploy's, and what pip is told."""

import os
import pwd
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from oobleck.cli.ssh import remote
from oobleck.cli.ssh.payload import UNIT, make_payload, shipped
from oobleck.cli.ssh.remote import Place, Refused
from support.folders import ROOT

DEPLOY = (ROOT / "deploy" / UNIT).read_text()
COMMAND = ["/bin/true", "--name", 'a "b" $c %d']
analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)


def place(folder: Path, user: str = "oobleck") -> Place:
    state = folder / "state"
    state.mkdir(exist_ok=True)
    return Place(folder, state, user)


def lines(text: str) -> set[str]:
    """Of a unit, without those that `up` has its own for."""
    found = text.replace("\\\n", " ").splitlines()
    return {
        line
        for line in found
        if line and line[0] not in "#[" and line.partition("=")[0] not in remote._REPLACED
    }


def written(folder: Path, scope: str, **others: str) -> Path:
    path = folder / "oobleck-up.service"
    path.write_text(remote.unit(DEPLOY, place(folder, **others), COMMAND, scope, ()))
    return path


def exposure(path: Path) -> float:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])


def test_roots_unit_has_all_that_deploys_has(tmp_path: Path) -> None:
    assert shipped(UNIT) == DEPLOY
    text = remote.unit(DEPLOY, place(tmp_path), COMMAND, "system", [str(tmp_path)])
    assert lines(DEPLOY) <= lines(text)
    assert "\nUser=oobleck\n" in text
    assert f'\nReadWritePaths="{tmp_path / "state"}" "{tmp_path}"\n' in text
    assert f'\nEnvironment="HOME={tmp_path / "state"}"\n' in text
    with pytest.raises(Refused, match="--writable /nowhere: the folder does not exist"):
        remote.unit(DEPLOY, place(tmp_path), COMMAND, "system", ["/nowhere"])


def test_a_users_unit_has_what_a_users_systemd_can_do(tmp_path: Path) -> None:
    text = remote.unit(DEPLOY, place(tmp_path), COMMAND, "user", ["/nowhere"])
    found = {line.partition("=")[0] for line in lines(text)}
    assert found >= remote._IN_USERS_UNITS
    assert not {"User", "ProtectSystem", "PrivateTmp", "CapabilityBoundingSet"} & found
    assert "\nWantedBy=default.target\n" in text


@analyze
def test_what_systemd_says_of_the_units(tmp_path: Path) -> None:
    of_deploy = exposure(ROOT / "deploy" / UNIT)
    assert exposure(written(tmp_path, "system")) <= of_deploy
    assert exposure(written(tmp_path, "system", user="root")) < 4.0
    for scope in ("system", "user"):
        path = written(tmp_path, scope)
        command = ["systemd-analyze", f"--{scope}", "verify", "--man=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "oobleck-up" not in done.stderr, done.stderr


def test_nobody_is_root_who_is_not_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    usual = remote.place("", "")
    assert (usual.user, usual.folder, usual.is_demoted) == (
        "oobleck",
        Path("/opt/oobleck-up"),
        True,
    )
    assert usual.state.parent == usual.folder
    assert not remote.place("", "root").is_demoted
    monkeypatch.setattr("os.geteuid", lambda: 65534)
    assert remote.place(str(tmp_path), "").user == "nobody"
    with pytest.raises(Refused, match="nobody cannot start an agent as root; log in as root"):
        remote.place(str(tmp_path), "root")


def test_hosts_take_no_file_of_another_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "oobleck_cluster-1.0-py3-none-any.whl"
    with zipfile.ZipFile(own, "w") as wheel:
        wheel.writestr("oobleck_cluster-1.0.dist-info/METADATA", "Metadata-Version: 2.1\n")
    payload = make_payload(own, None, None, "python3", tmp_path)
    assert payload.requirements == (ROOT / "requirements.txt").read_text()
    assert payload.constraint == (ROOT / "constraints.txt").read_text()
    mine = tmp_path / "mine.txt"
    mine.write_text("numpy==2\n")
    chosen = make_payload(own, None, mine, "python3", tmp_path)
    assert (chosen.requirements, chosen.constraint) == ("", "numpy==2\n")

    shutil.copy(own, tmp_path / "numpy-1.0-py3-none-any.whl")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    pinned = f"numpy==1.0 --hash=sha256:{'0' * 64}\n"
    with pytest.raises(Refused, match="DO NOT MATCH THE HASHES"):
        remote.install(place(tmp_path), "key", [own.name], pinned, "", alone=False)
    assert not (tmp_path / "venvs" / "key" / "whole").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_what_another_users_jobs_wrote_is_not_removed(tmp_path: Path) -> None:
    there = place(tmp_path, "nobody")
    os.chown(there.state, pwd.getpwnam("daemon").pw_uid, -1)
    (there.state / "checkpoint").write_text("weights")
    with pytest.raises(Refused, match=r"belongs to daemon, .*--run-as daemon, .*--purge"):
        remote._make_state(there)
    assert (there.state / "checkpoint").read_text() == "weights"

"""A folder of credentials changes its holder no more, whoever is told to write there."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from oobleck.agent.connection.enrol import choose_way
from oobleck.cli.cluster.authority import issue, make_authority
from oobleck.host.command import CommandFailed
from oobleck.host.security import pki
from oobleck.host.security.credential_folder import issue as issue_by
from oobleck.host.security.credential_folder import issued, keep, own_key, read_authority
from oobleck.host.security.credentials import Credentials, Role, create_private, read_credentials

NOBODY = 65_534
HERE = pki.Authority.new("here")
ELSEWHERE = pki.Authority.new("elsewhere")


def put(folder: Path, role: Role, name: str, authority: pki.Authority = HERE) -> Credentials:
    key = own_key(folder).public_key()
    signed = authority.sign(key, pki.Identity(role=role, name=name), 60.0)
    return keep(folder, authority.certificate, signed)


def token(role: Role = "agent", authority: pki.Authority = HERE) -> Credentials:
    key = pki.new_key()
    identity = pki.Identity(role=role, name="", token=True)
    certificate = authority.sign(key.public_key(), identity, 60.0)
    return Credentials(
        authority=authority.certificate, certificate=certificate, key=pki.key_pem(key)
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def start_agent(folder: Path) -> None:
    choose_way("198.51.100.1:1", "n1", folder, token(), insecure=False)


@pytest.mark.parametrize(
    ("write", "fix"),
    [
        (start_agent, "has the certificate of operator ann, which stays; agent n1 needs a folder"),
        (lambda folder: put(folder, "agent", "n1"), "has the certificate of operator ann"),
        (lambda folder: put(folder, "viewer", "ann"), "has the certificate of operator ann"),
        (lambda folder: put(folder, "operator", "bob"), "has the certificate of operator ann"),
        (lambda folder: put(folder, "operator", "ann", ELSEWHERE), "in another cluster"),
    ],
    ids=["agent", "another", "another role", "another name", "another cluster"],
)
def test_what_is_there_stays(tmp_path: Path, write: Callable[[Path], object], fix: str) -> None:
    put(tmp_path, "operator", "ann")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=fix) as refused:
        write(tmp_path)
    assert "name another folder, or move this one away" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", no_link)
    put(tmp_path, "operator", "ann")
    before = contents(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    with pytest.raises(ValueError, match="has the certificate of operator ann"):
        put(tmp_path, "viewer", "eve")
    for path in tmp_path.iterdir():
        assert not create_private(path, b"another")
    assert contents(tmp_path) == before


def test_a_file_system_where_others_read_everything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FAT does: the mode of a file is what it is."""
    chmod = os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda file, mode: chmod(file, 0o755))
    with pytest.raises(OSError, match="its file system lets others read every file"):
        own_key(tmp_path)
    assert not contents(tmp_path)


def test_credentials_that_have_ended_stay_too(tmp_path: Path) -> None:
    key = own_key(tmp_path).public_key()
    ended = HERE.sign(key, pki.Identity(role="operator", name="ann"), 0.0)
    keep(tmp_path, HERE.certificate, ended)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="has the certificate of operator ann"):
        start_agent(tmp_path)
    assert contents(tmp_path) == before


def test_an_agent_takes_no_token_that_it_could_not_keep(tmp_path: Path) -> None:
    put(tmp_path, "agent", "n1")
    before = contents(tmp_path)
    foreign = token(authority=ELSEWHERE)
    with pytest.raises(ValueError, match="in another cluster"):
        choose_way("198.51.100.1:1", "n1", tmp_path, foreign, insecure=False)
    with pytest.raises(ValueError, match="is for the role operator; make an agent's"):
        choose_way("198.51.100.1:1", "n2", tmp_path / "n2", token("operator"), insecure=False)
    assert contents(tmp_path) == before
    assert not (tmp_path / "n2").exists()


def test_an_agent_says_that_it_does_not_read_the_operators_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOBLECK_CREDENTIALS", str(tmp_path))
    told = "OOBLECK_CREDENTIALS is not read by agents: give --credentials DIR"
    with pytest.raises(ValueError, match=told):
        choose_way("198.51.100.1:1", "n1", tmp_path / "n1", None, insecure=False)


def test_an_authority_and_its_operator_are_never_written_over(tmp_path: Path) -> None:
    """Each of the folder's files alone tells that something is there that could be needed."""
    home = tmp_path / "pki"
    make_authority(home, ())
    for name in ("ca.crt", "ca.key", "master.key", "master.crt", "operator"):
        left = tmp_path / name
        left.mkdir()
        (home / name).rename(left / name)
        with pytest.raises(CommandFailed, match=f"or part of one .{name}.; use it, or move"):
            make_authority(left, ())
        assert [path.name for path in left.iterdir()] == [name]
        (left / name).rename(home / name)
    before = contents(home / "operator")
    with pytest.raises(CommandFailed, match="has the certificate of operator admin"):
        issue(home, home / "operator", "agent", "n1")
    assert contents(home / "operator") == before
    # Into an authority's own folder, where the other authority's certificate would go.
    make_authority(tmp_path / "other", ())
    before = contents(home)
    with pytest.raises(CommandFailed, match="in another cluster"):
        issue(tmp_path / "other", home, "agent", "n1")
    assert contents(home) == before


def test_the_same_holder_gets_another_certificate_of_the_same_key(tmp_path: Path) -> None:
    first = put(tmp_path, "agent", "n1")
    second = put(tmp_path, "agent", "n1")
    assert second.certificate != first.certificate
    assert (second.key, second.authority) == (first.key, first.authority)
    assert read_credentials(tmp_path) == second


def test_a_certificate_of_another_key_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "agent", "n1")
    before = contents(tmp_path)
    other = HERE.sign(pki.new_key().public_key(), pki.Identity(role="agent", name="n1"), 60.0)
    with pytest.raises(ValueError, match="is not the key that the certificate is for"):
        keep(tmp_path, HERE.certificate, other)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["client.crt", "ca.crt", "client.key"])
def test_what_cannot_be_read_stays(tmp_path: Path, name: str) -> None:
    put(tmp_path, "agent", "n1")
    (tmp_path / name).write_bytes(b"damaged")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=f"{name}: is not a readable .*; name another"):
        put(tmp_path, "agent", "n1")
    assert contents(tmp_path) == before


def come(who: tuple[str, pki.Authority], folder: Path, start: Barrier) -> Credentials | None:
    start.wait()
    try:
        return put(folder, "agent", *who)
    except ValueError:
        return None


def test_of_many_that_come_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    crowd = [(f"n{number}", (HERE, ELSEWHERE)[number % 2]) for number in range(8)]
    for attempt in range(5):
        folder, start = tmp_path / f"{attempt}", Barrier(len(crowd))
        with ThreadPoolExecutor(len(crowd)) as threads:
            tried = threads.map(come, crowd, [folder] * len(crowd), [start] * len(crowd))
            kept = [found for found in tried if found is not None]
        assert kept == [read_credentials(folder)]


def init(folder: Path, start: Barrier) -> str:
    """What it is refused with; empty: it made the authority."""
    start.wait()
    try:
        make_authority(folder, ())
    except CommandFailed as refused:
        return refused.message
    return ""


def test_of_authorities_that_are_made_at_once_one_is_whole_and_the_others_are_refused(
    tmp_path: Path,
) -> None:
    for attempt in range(6):
        folder, start = tmp_path / f"{attempt}", Barrier(3)
        with ThreadPoolExecutor(3) as threads:
            told = sorted(threads.map(init, [folder] * 3, [start] * 3))
        assert told[0] == "", told
        assert all("already has an authority, or part of one" in line for line in told[1:]), told
        certificate = (folder / "ca.crt").read_bytes()
        assert pki.matches(certificate, pki.read_key((folder / "ca.key").read_bytes()))
        master = pki.read_key((folder / "master.key").read_bytes())
        assert pki.matches((folder / "master.crt").read_bytes(), master)
        assert read_credentials(folder / "operator").authority == certificate


def test_a_record_that_cannot_be_used_is_told_with_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "pki"
    make_authority(home, ())
    record = home / "issued.jsonl"
    assert [one.name for one in issued(home)] == ["admin"]
    record.unlink()
    assert issued(home) == []
    record.mkdir()
    with pytest.raises(ValueError, match=r"issued.jsonl: is a directory; put that right, or move"):
        issued(home)
    issue(home, tmp_path / "n1", "agent", "n1")
    assert pki.identity_of(read_credentials(tmp_path / "n1").certificate).name == "n1"
    told = "oobleck: warning: 'oobleck pki list' will not show agent n1: "
    assert capsys.readouterr().err.startswith(f"{told}{record}: is a directory; ")


@pytest.fixture
def anothers() -> Iterator[Path]:
    """An authority that belongs to another user, without a record."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "pki"
        make_authority(home, ())
        (home / "issued.jsonl").unlink()
        for path in (Path(folder), home, home / "ca.crt", home / "ca.key"):
            os.chown(path, NOBODY, NOBODY)
        yield home


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_record_by_root_is_the_owners_of_the_authority(anothers: Path, tmp_path: Path) -> None:
    issue(anothers, tmp_path / "n1", "agent", "n1")
    made = (anothers / "issued.jsonl").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o777) == (NOBODY, NOBODY, 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_record_of_another_user_is_told_with_the_command_that_mends_it(anothers: Path) -> None:
    record = anothers / "issued.jsonl"
    create_private(record, b"")
    fix = f"{record}: permission denied; run: sudo chown --reference={anothers / 'ca.key'} {record}"
    os.seteuid(NOBODY)
    try:
        authority = read_authority(anothers)
        warning = issue_by(authority, anothers, anothers / "n1", "agent", "n1")
        with pytest.raises(ValueError, match="permission denied") as refused:
            issued(anothers)
    finally:
        os.seteuid(0)
    assert warning == f"'oobleck pki list' will not show agent n1: {fix}"
    assert str(refused.value) == fix


def test_what_was_left_of_an_authority_stays(tmp_path: Path) -> None:
    """As by a process that was killed while it made one."""
    (tmp_path / "ca.key").write_text("left")
    with pytest.raises(CommandFailed, match=r"part of one \(ca.key\)"):
        make_authority(tmp_path, ())
    assert contents(tmp_path) == {"ca.key": b"left"}

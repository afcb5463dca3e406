"""Joining a cluster as users do it: init, tokens, nodes that join, renewal, revocation."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from bench.support.ports import choose_address
from oobleck.host.security import pki
from oobleck.host.security.credentials import read_credentials
from oobleck.host.security.pki import format_token, read_token
from support.commands import end, refused, run, start_master
from support.holders import dated
from support.secured import Secured

pytestmark = pytest.mark.usefixtures("quick_start")

DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    cluster = Secured(tmp_path_factory.mktemp("secured"), "--certificate-life-s", "20")
    yield cluster
    end(cluster.process)


Start = Callable[..., tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture
def start_agent(secured: Secured, tmp_path: Path) -> Iterator[Start]:
    """Starts agents; gives the process and its log."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *options: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"{name}-{len(started)}.log"
        arguments = ("--master", secured.address, "--name", name, *options)
        with log.open("wb") as output:
            command = [sys.executable, "-m", "oobleck.agent", *arguments]
            process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=output, stderr=output
            )
        started.append(process)
        return process, log

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)


def until(condition: Callable[[], object], what: object = "") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_what_init_makes_is_for_its_owner_alone(secured: Secured) -> None:
    for path in (secured.pki, *secured.pki.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert pki.server_names((secured.pki / "master.crt").read_bytes()) == ("10.1.2.3",)
    for path in (secured.folder / "state").iterdir():
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    again = run("pki", "init", "--dir", str(secured.pki))
    assert "already has an authority" in refused(again, 2)


def test_a_node_joins_once_by_a_token_and_renews(secured: Secured, start_agent: Start) -> None:
    token = secured.token()
    folder = secured.folder / "n1"
    agent, log = start_agent("n1", "--credentials", str(folder), "--token-file", str(token))
    until(lambda: secured.states().get("n1") == "live", log)
    first = pki.identity_of(read_credentials(folder).certificate)
    assert (first.role, first.name) == ("agent", "n1")
    assert stat.S_IMODE((folder / "client.key").stat().st_mode) == 0o600

    def issued_at() -> float:
        return pki.identity_of(read_credentials(folder).certificate).issued_at

    until(lambda: issued_at() > first.issued_at)
    # What was given out is known to the next master too, and the new certificate is good there.
    secured.restart()
    until(lambda: log.read_text().count("session began") >= 2, log)

    other, other_log = start_agent(
        "n2", "--credentials", str(secured.folder / "n2"), "--token-file", str(token)
    )
    assert other.wait(DEADLINE_S) == 2
    assert "the join token was used before" in other_log.read_text()

    # Another token does not help to a name that somebody holds.
    thief, thief_log = start_agent(
        "n1", "--credentials", str(secured.folder / "thief"), "--token-file", str(secured.token())
    )
    assert thief.wait(DEADLINE_S) == 2
    assert "agent n1 has a certificate already" in thief_log.read_text()

    assert secured.oobleck("pki", "revoke", "n1").returncode == 0
    assert agent.wait(DEADLINE_S) == 2
    assert "its certificate was revoked" in log.read_text()


def test_a_name_that_was_revoked_joins_anew_in_the_same_folder(
    secured: Secured, start_agent: Start
) -> None:
    folder = ("--credentials", str(secured.folder / "n3"))
    first, log = start_agent("n3", *folder, "--token-file", str(secured.token("--name", "n3")))
    until(lambda: secured.states().get("n3") == "live", log)
    assert secured.oobleck("pki", "revoke", "n3").returncode == 0
    assert first.wait(DEADLINE_S) == 2
    again, log = start_agent("n3", *folder, "--token-file", str(secured.token()))
    until(lambda: "session began" in log.read_text())
    assert again.poll() is None


def test_a_token_goes_into_a_file_of_its_owners(secured: Secured, tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0o000)
    try:
        first = secured.oobleck("pki", "token", "--out", str(path))
        again = secured.oobleck("pki", "token", "--role", "viewer", "--out", str(path))
    finally:
        os.umask(before)
    assert (first.returncode, again.returncode) == (0, 0), (first, again)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert pki.identity_of(read_token(path.read_text()).certificate).role == "viewer"
    assert list(tmp_path.iterdir()) == [path]


def told_of_late_master(tmp_path: Path, *options: str) -> tuple[int, str, str]:
    """Exit code and output of `pki token` that waits for a master of this user."""
    state, address = tmp_path / "state", choose_address()
    assert run("pki", "init", "--dir", str(state / "pki")).returncode == 0
    command = [sys.executable, "-m", "oobleck.cli.main", "pki", "token", "--master", address]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *options], stdout=pipe, stderr=pipe, text=True) as asking:
        assert asking.stderr is not None
        assert f"no master listens at {address} yet" in asking.stderr.readline()
        process, _ = start_master(state, address)
        made, told = asking.communicate(timeout=DEADLINE_S)
    end(process)
    return asking.returncode, made, told


def test_a_token_waits_for_a_master_whose_credentials_are_known_only_then(tmp_path: Path) -> None:
    code, made, told = told_of_late_master(tmp_path)
    assert (code, told) == (0, "")
    assert pki.identity_of(read_token(made.strip()).certificate).role == "agent"


def test_after_its_wait_too_a_call_in_the_clear_shows_no_credentials(tmp_path: Path) -> None:
    code, made, told = told_of_late_master(tmp_path, "--insecure")
    assert (code, made) == (5, "")
    assert "requires credentials, and none are known here" in told


def test_a_token_is_put_over_nothing_but_a_token(secured: Secured, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("important\n")
    for path in (notes, Path("/dev/null")):
        line = refused(secured.oobleck("pki", "token", "--out", str(path)), 2)
        assert f"--out {path}: exists, and is not a join token; name another file" in line
    nowhere = secured.oobleck("pki", "token", "--out", str(tmp_path / "no" / "token"))
    assert "no such file or directory; name another file" in refused(nowhere, 1).lower()
    assert notes.read_text() == "important\n"


def test_an_agent_uses_no_operators_credentials(secured: Secured, start_agent: Start) -> None:
    """Neither those that its shell has exported, nor those that it is told of by mistake."""
    before = {path: path.read_bytes() for path in secured.operator.iterdir()}
    token = ("--token-file", str(secured.token()))
    agent, log = start_agent("n5", "--credentials", str(secured.operator), *token)
    assert agent.wait(DEADLINE_S) == 2
    (line,) = log.read_text().splitlines()
    assert "has the certificate of operator admin, which stays" in line
    assert "name another folder" in line
    exported = {"OOBLECK_CREDENTIALS": str(secured.operator), "HOME": str(secured.folder / "home")}
    agent, log = start_agent("n5", *token, **exported)
    until(lambda: secured.states().get("n5") == "live", log)
    kept = read_credentials(secured.folder / "home" / ".oobleck" / "nodes" / "n5")
    assert pki.identity_of(kept.certificate).uri == "oobleck://agent/n5"
    assert {path: path.read_bytes() for path in secured.operator.iterdir()} == before


def test_who_joins_writes_over_nobodys_credentials(secured: Secured, tmp_path: Path) -> None:
    token = secured.token("--role", "viewer")
    before = {path: path.read_bytes() for path in secured.operator.iterdir()}

    def join(folder: Path) -> subprocess.CompletedProcess[str]:
        shown = ("--token-file", str(token), "--credentials", str(folder))
        return run("pki", "join", "kim", "--master", secured.address, *shown)

    line = refused(join(secured.operator), 2)
    assert "has the certificate of operator admin, which stays; viewer kim needs a folder" in line
    assert {path: path.read_bytes() for path in secured.operator.iterdir()} == before
    assert join(tmp_path / "kim").returncode == 0, "the token is still good"


def test_operators_and_viewers_join_too(secured: Secured, tmp_path: Path) -> None:
    token = secured.token("--role", "viewer")
    arguments = ("pki", "join", "ann", "--master", secured.address)
    folder = tmp_path / "ann"
    joined = run(*arguments, "--token-file", str(token), "--credentials", str(folder))
    assert joined.returncode == 0, joined
    assert secured.oobleck("nodes", who=folder).returncode == 0
    denied = refused(secured.oobleck("cancel", "job-1", who=folder), 5)
    assert "viewer ann may not call CancelJob; operator may" in denied
    renewed = run("pki", "renew", "--master", secured.address, "--credentials", str(folder))
    assert renewed.returncode == 0, renewed
    listed = json.loads(secured.oobleck("pki", "list", "--json").stdout)
    assert yaml.safe_load(secured.oobleck("pki", "list", "-o", "yaml").stdout) == listed
    assert ("viewer", "ann") in [(held["role"], held["name"]) for held in listed["credentials"]]
    assert secured.oobleck("pki", "revoke", "ann").stdout == "revoked viewer ann\n"
    assert "was revoked" in refused(secured.oobleck("nodes", who=folder), 5)


def test_an_operator_s_tokens_end_with_him(secured: Secured, tmp_path: Path) -> None:
    def token(who: Path, role: str) -> Path:
        made = secured.oobleck("pki", "token", "--role", role, "--ttl", "7d", who=who)
        path = tmp_path / f"token-{os.urandom(4).hex()}"
        path.touch(0o600)
        path.write_text(made.stdout)
        return path

    def join(name: str, shown: Path) -> subprocess.CompletedProcess[str]:
        arguments = ("--token-file", str(shown), "--credentials", str(tmp_path / name))
        return run("pki", "join", name, "--master", secured.address, *arguments)

    eve, mal = tmp_path / "eve", tmp_path / "mal"
    assert join("eve", token(secured.operator, "operator")).returncode == 0
    kept = token(eve, "operator")
    assert join("mal", token(eve, "operator")).returncode == 0
    assert join("vic", token(mal, "viewer")).returncode == 0
    listed = secured.oobleck("pki", "list").stdout
    assert re.search(r"^vic +certificate +viewer +\S+ \S+ +operator mal$", listed, re.MULTILINE)
    assert re.search(r"^any +token \S+ +operator +\S+ \S+ +operator eve$", listed, re.MULTILINE)
    revoked = secured.oobleck("pki", "revoke", "eve").stdout.splitlines()
    assert revoked == [
        "revoked operator eve",
        "still admitted, by tokens of eve or of their holders: operator mal, viewer vic",
    ]
    assert "expired or was revoked" in refused(join("new", kept), 5)
    himself = secured.oobleck("pki", "revoke", "mal", who=mal)
    assert (himself.returncode, himself.stdout.splitlines()) == (
        0,
        [
            "revoked operator mal",
            "still admitted, by tokens of mal or of their holders: viewer vic",
        ],
    )


def test_a_token_can_be_taken_back_and_ends(secured: Secured, tmp_path: Path) -> None:
    def join(token: Path) -> subprocess.CompletedProcess[str]:
        arguments = ("pki", "join", "bob", "--master", secured.address)
        shown = ("--token-file", str(token), "--credentials", str(tmp_path / "bob"))
        return run(*arguments, *shown)

    revoked = secured.token("--role", "operator")
    tokens = json.loads(secured.oobleck("pki", "list", "--json").stdout)["tokens"]
    (listed,) = [found for found in tokens if found["role"] == "operator"]
    assert secured.oobleck("pki", "revoke", "--token", listed["id"]).returncode == 0
    assert "expired or was revoked" in refused(join(revoked), 5)
    assert secured.oobleck("pki", "revoke", "--token", listed["id"]).returncode == 3

    short = secured.token("--role", "operator", "--ttl", "1s")
    expires_at = pki.identity_of(read_token(short.read_text()).certificate).expires_at
    until(lambda: time.time() > expires_at)
    # The handshake fails already, so that the master cannot say why.
    assert "the join token for any operator ended on 20" in refused(join(short), 5)
    bound = secured.token("--role", "operator", "--name", "eve")
    assert "is for operator eve" in refused(join(bound), 5)


def test_an_agent_whose_token_has_ended_ends(secured: Secured, start_agent: Start) -> None:
    token = secured.token("--ttl", "1s")
    expires_at = pki.identity_of(read_token(token.read_text()).certificate).expires_at
    until(lambda: time.time() > expires_at)
    folder = ("--credentials", str(secured.folder / "late"))
    agent, log = start_agent("late", *folder, "--token-file", str(token))
    assert agent.wait(DEADLINE_S) == 2
    assert "the join token for any agent ended on 20" in log.read_text()


def test_nobody_is_revoked_by_a_guess(secured: Secured, tmp_path: Path) -> None:
    assert "--role ROLE" in refused(secured.oobleck("pki", "revoke", "nobody"), 3)
    for role in ("viewer", "operator"):
        token = ("--token-file", str(secured.token("--role", role)))
        folder = ("--credentials", str(tmp_path / role))
        joined = run("pki", "join", "zoe", "--master", secured.address, *token, *folder)
        assert joined.returncode == 0, joined
    several = refused(secured.oobleck("pki", "revoke", "zoe"), 2)
    assert "several roles (operator, viewer)" in several
    assert secured.oobleck("pki", "revoke", "zoe", "--role", "viewer").returncode == 0
    assert secured.oobleck("nodes", who=tmp_path / "operator").returncode == 0


def test_who_is_of_another_cluster_reads_so(secured: Secured, tmp_path: Path) -> None:
    assert run("pki", "init", "--dir", str(tmp_path / "pki")).returncode == 0
    foreign = secured.oobleck("nodes", who=tmp_path / "pki" / "operator")
    told = refused(foreign, 5)
    assert "the certificate of operator admin is of cluster " in told
    assert "the master there is of another cluster" in told
    assert "'oobleck pki join admin'" in told
    unknown = run("nodes", "--master", secured.address, "--insecure")
    assert "requires credentials, and none are known here" in refused(unknown, 5)


DAY_S = 86_400.0


def test_a_certificate_that_is_not_good_is_told_as_just_that(
    secured: Secured, start_agent: Start, tmp_path: Path
) -> None:
    ended = dated(secured.pki, tmp_path / "ended", "operator", "ann", -20 * DAY_S, -DAY_S)
    told = refused(secured.oobleck("nodes", who=ended), 5)
    assert "denied: the certificate of operator ann ended on 20" in told
    assert "'oobleck pki issue ann --role operator'" in told
    later = dated(secured.pki, tmp_path / "later", "viewer", "bob", DAY_S, 2 * DAY_S)
    told = refused(secured.oobleck("nodes", who=later), 5)
    assert "denied: the certificate of viewer bob is not valid before 20" in told
    assert "set this host's clock" in told
    of_agent = dated(secured.pki, tmp_path / "n8", "agent", "n8", -20 * DAY_S, -DAY_S)
    agent, log = start_agent("n8", "--credentials", str(of_agent))
    assert agent.wait(DEADLINE_S) == 2
    assert "the certificate of agent n8 ended on 20" in log.read_text()
    assert "'oobleck pki token --name n8 --out FILE'" in log.read_text()


def test_a_certificate_that_ends_within_two_weeks_is_warned_of(
    secured: Secured, start_agent: Start, tmp_path: Path
) -> None:
    soon = dated(secured.pki, tmp_path / "soon", "operator", "eva", -60 * DAY_S, 13.5 * DAY_S)
    done = secured.oobleck("nodes", who=soon)
    assert done.returncode == 0, done
    warning = (
        r"warning: the certificate of operator eva ends on 20\S+ \S+, in 13 days; renew it with"
    )
    assert re.fullmatch(rf"{warning} 'oobleck pki renew'\n", done.stderr), done
    good = dated(secured.pki, tmp_path / "good", "operator", "eva", -60 * DAY_S, 14.5 * DAY_S)
    assert secured.oobleck("nodes", who=good).stderr == ""
    of_agent = dated(secured.pki, tmp_path / "n9", "agent", "n9", -60 * DAY_S, 9.5 * DAY_S)
    _, log = start_agent("n9", "--credentials", str(of_agent))
    until(lambda: secured.states().get("n9") == "live", log)
    line = (
        r" WARNING \S+ a certificate needs attention reason=\"the certificate of agent n9 ends on"
    )
    assert len(re.findall(line, log.read_text())) == 1, log.read_text()
    done = secured.oobleck("doctor", "--node", "n9", "--json")
    found = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "certificate"]
    (of_node,) = [one for one in found if one["node"] == "n9"]
    assert of_node["level"] == "warn"
    assert "the certificate of agent n9 ends on 20" in of_node["what"]
    (of_head,) = [one for one in found if one["node"] == "(head)"]
    assert (of_head["level"], of_head["what"]) == ("pass", "good for another 3649 days")


def test_the_list_has_certificates_that_were_made_without_the_master(
    secured: Secured, tmp_path: Path
) -> None:
    made = run("pki", "issue", "ida", "--role", "viewer", "--dir", str(secured.pki), "--out",
               str(tmp_path / "ida"))  # fmt: skip
    assert made.returncode == 0, made
    listed = secured.oobleck("pki", "list").stdout
    assert re.search(r"^admin +certificate +operator +20\S+ \S+$", listed, re.MULTILINE), listed
    assert re.search(r"^ida +certificate +viewer +20\S+ \S+$", listed, re.MULTILINE), listed
    assert secured.oobleck("pki", "revoke", "ida").returncode == 0
    listed = secured.oobleck("pki", "list").stdout
    assert re.search(r"^ida +certificate +viewer +revoked$", listed, re.MULTILINE), listed


def test_viewers_are_told_nothing_of_tokens_and_certificates(
    secured: Secured, tmp_path: Path
) -> None:
    """As the list of them is for operators alone."""
    folder = tmp_path / "vic"
    secured.token("--role", "agent", "--name", "secret-name")
    token = ("--token-file", str(secured.token("--role", "viewer", "--name", "vic")))
    shown = ("--master", secured.address, "--credentials", str(folder))
    assert run("pki", "join", "vic", *token, *shown).returncode == 0

    def told(who: Path) -> set[str]:
        done = secured.oobleck("events", "--json", who=who)
        assert done.returncode == 0, done
        return {json.loads(line)["event"] for line in done.stdout.splitlines()}

    for_operators = {"token_created", "certificate_issued", "certificates_revoked"}
    seen = told(secured.operator)
    assert for_operators - {"certificates_revoked"} <= seen
    assert told(folder) == seen - for_operators - {"token_revoked"}
    assert "master_started" in told(folder)
    assert secured.oobleck("pki", "revoke", "vic").returncode == 0


def test_a_list_without_the_record_of_such_certificates_is_refused(
    secured: Secured, tmp_path: Path
) -> None:
    record = secured.pki / "issued.jsonl"
    record.rename(tmp_path / "kept")
    record.mkdir()
    line = refused(secured.oobleck("pki", "list"), 2)
    assert f"on the master's host, {record}: is a directory; put that right" in line
    record.rmdir()
    (tmp_path / "kept").rename(record)
    assert secured.oobleck("pki", "list").returncode == 0


def test_nothing_secret_is_in_logs_arguments_or_the_journal(
    secured: Secured, start_agent: Start, tmp_path: Path
) -> None:
    token = secured.token("--name", "n4").read_text().strip()
    folder = tmp_path / "n4"
    os.environ["OOBLECK_JOIN_TOKEN"] = token
    try:
        _, log = start_agent("n4", "--credentials", str(folder))
    finally:
        del os.environ["OOBLECK_JOIN_TOKEN"]
    until(lambda: "session began" in log.read_text(), log)
    until(lambda: psutil.Process(_.pid).children())
    key = (folder / "client.key").read_text()
    secrets = [token[9:50], token[-60:], *re.findall(r"[A-Za-z0-9+/]{40,}", key)]
    assert len(secrets) >= 4
    for process in psutil.process_iter():
        try:
            arguments = " ".join(process.cmdline())
        except psutil.Error:
            continue
        assert not any(secret in arguments for secret in secrets), process
    for child in psutil.Process(_.pid).children(recursive=True):
        assert "OOBLECK_JOIN_TOKEN" not in child.environ(), child
    files = [
        log,
        secured.errors,
        *(p for p in (secured.folder / "state").rglob("*") if p.is_file()),
    ]
    for path in files:
        content = path.read_bytes().decode(errors="replace")
        assert not any(secret in content for secret in secrets), path


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("nodes", "--master", "198.51.100.1:4600"), "--credentials or OOBLECK_CREDENTIALS"),
        (
            ("nodes", "--insecure", "--master", "198.51.100.1:4600"),
            "is not an address of this host",
        ),
        (
            ("nodes", "--credentials", "/nowhere"),
            "/nowhere/ca.crt: no such file or directory; name a folder with credentials, as "
            "'oobleck pki join' makes one",
        ),
        (("pki", "token", "--ttl", "soon"), "write it like 30s, 10m or 1.5h"),
        (("pki", "token", "--name", "N1"), "agent name 'N1' is not allowed"),
        (("pki", "token"), "this master has no authority"),
        # Before a token is asked for.
        (("pki", "token", "--out", "/nowhere/x"), "--out /nowhere/x: No such file or directory"),
        (("pki", "join", "x", "--master", "127.0.0.1:1"), "give a join token with --token-file"),
        (("pki", "revoke"), "give a NAME, or --token ID"),
        (("pki", "init", "--dir", "/proc/pki"), "choose another"),
        (
            ("pki", "init", "--dir", "/nowhere/x", "--name", "a b"),
            "is not a DNS name or an IP address",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage(master: str, arguments: tuple[str, ...], part: str) -> None:
    named = () if "--master" in arguments or "init" in arguments else ("--master", master)
    result = run(*arguments, *named)
    assert result.returncode in (1, 2)
    assert part in refused(result, result.returncode)


@pytest.mark.parametrize(
    ("program", "arguments", "part"),
    [
        ("master", ("--listen", "0.0.0.0:0"), "run 'oobleck pki init --dir"),
        ("master", ("--listen", "0.0.0.0:0", "--insecure"), "is not an address of this host"),
        ("master", ("--listen", "127.0.0.1:0", "--pki", "/nowhere"), "no such file"),
        ("agent", ("--master", "198.51.100.1:1"), "the agent needs credentials"),
        # A name that does not resolve yet may lead anywhere.
        ("agent", ("--master", "no.such.host.invalid:1"), "the agent needs credentials"),
        ("agent", ("--master", "198.51.100.1:1", "--insecure"), "is not an address of this host"),
        ("agent", ("--master", "127.0.0.1:1", "--token-file", __file__), "others may read it"),
    ],
)
def test_daemons_refuse_what_others_could_reach(
    tmp_path: Path, program: str, arguments: tuple[str, ...], part: str
) -> None:
    more = ("--state-dir", str(tmp_path / "state")) if program == "master" else ("--name", "n1")
    result = subprocess.run(
        [sys.executable, "-m", f"oobleck.{program}", *arguments, *more],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 2
    assert part in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_key_that_others_may_read_is_refused(secured: Secured, tmp_path: Path) -> None:
    for name in ("ca.crt", "client.crt", "client.key"):
        (tmp_path / name).write_bytes((secured.operator / name).read_bytes())
    (tmp_path / "client.key").chmod(0o644)
    result = secured.oobleck("nodes", who=tmp_path)
    assert "chmod 600" in refused(result, 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [("client.crt", b""), ("client.key", b"\xff" * 300), ("ca.crt", b"x"), ("client.key", None)],
)
def test_damaged_credentials_are_refused(
    secured: Secured, tmp_path: Path, name: str, content: bytes | None
) -> None:
    for file in ("ca.crt", "client.crt", "client.key"):
        (tmp_path / file).write_bytes((secured.operator / file).read_bytes())
    (tmp_path / name).write_bytes(pki.key_pem(pki.new_key()) if content is None else content)
    (tmp_path / "client.key").chmod(0o600)
    line = refused(secured.oobleck("nodes", who=tmp_path), 2)
    assert str(tmp_path) in line
    assert "'oobleck pki join'" in line


def test_a_damaged_token_is_refused_and_not_repeated() -> None:
    signer, key = pki.Authority.new("test"), pki.new_key()
    identity = pki.Identity(role="agent", name="n1", token=True)
    from oobleck.host.security.credentials import Credentials

    whole = Credentials(
        authority=signer.certificate,
        certificate=signer.sign(key.public_key(), identity, 60.0),
        key=pki.key_pem(key),
    )
    text = format_token(whole)
    assert pki.identity_of(read_token(text).certificate).uri == identity.uri
    assert read_token(text).key == whole.key
    for damaged in (text[:-100], text[:200] + text[300:], text + "!", "x" + text, "", "\0"):
        with pytest.raises(ValueError, match="token") as caught:
            read_token(damaged)
        assert text[100:150] not in str(caught.value)


def test_the_master_s_own_copies_are_read_by_a_viewer(secured: Secured, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("some text " * 100)
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: tracked\nmodel: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}\n"
        f"data: {{text: [{tmp_path}/data.txt]}}\ntraining: {{steps: 2, global_batch: 4}}\n"
        "track: [mlflow]\n"
    )
    job_id = secured.oobleck("submit", str(job)).stdout.strip()
    state = secured.folder / "state"

    def text() -> str:
        found = [path.read_text() for path in state.glob("tracking/mlflow/*/*/artifacts/*.txt")]
        return "".join(found)

    until(lambda: "submitted" in text(), "the copy begins")
    viewer = state / "viewer"
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in [viewer, *viewer.iterdir()]} == {
        0
    }
    assert secured.oobleck("jobs", who=viewer).returncode == 0
    assert "viewer master may not call" in refused(secured.oobleck("cancel", job_id, who=viewer), 5)
    secured.restart()
    assert secured.oobleck("cancel", job_id).returncode == 0
    until(lambda: "cancelled" in text(), "the copy goes on, and ends with the job")
    assert text().count("submitted") == 1

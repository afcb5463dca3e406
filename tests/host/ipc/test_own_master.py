"""A master is found by its own user's processes alone, and by its name no other one is."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oobleck.agent.connection.enrol import choose_way
from oobleck.cli.cluster.authority import have_issued, issue, make_authority
from oobleck.host.ipc.endpoint import OwnMaster, announced, choose_endpoint, find_own_master
from oobleck.host.security import credential_folder as signing
from oobleck.host.security import pki
from oobleck.host.security.credentials import read_credentials
from support.waiting import PATIENCE_S

OWN = OwnMaster(pki=Path("/some/pki"), private=True)
#: Of another user: the one who is nobody has no other processes here.
NOBODY = 65_534


@pytest.fixture
def port() -> Iterator[int]:
    """One that no master has meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def here(port: int) -> str:
    return f"127.0.0.1:{port}"


def test_a_master_is_found_by_what_leads_to_it_as_long_as_it_lives(port: int, here: str) -> None:
    with announced(here, OWN):
        assert find_own_master(here) == OWN
        assert find_own_master(f"localhost:{port}") == OWN
        assert [find_own_master(other) for other in ("127.0.0.1:1", f"127.0.0.2:{port}")] == [
            None,
            None,
        ]
        with pytest.raises(OSError, match="in use"), announced(here, OWN):
            pass
        assert find_own_master(here) == OWN, "whom the other one has not taken away"
    assert find_own_master(here) is None
    everywhere = OwnMaster(pki=Path("/else\udcff"), private=False)
    with announced(f"0.0.0.0:{port}", everywhere):
        assert (find_own_master(here), find_own_master(f"127.0.0.3:{port}")) == (
            everywhere,
            everywhere,
        )
        assert find_own_master(f"192.0.2.1:{port}") is None, "which is not this host"
    with announced(f"[::1]:{port}", OWN):
        assert (find_own_master(f"[::1]:{port}"), find_own_master(here)) == (OWN, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_whoever_else_takes_the_name_is_not_believed(here: str) -> None:
    squat = (
        f"import os, socket, sys; name = '\\0oobleck/0/{here}'; "
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); "
        "taken = socket.socket(socket.AF_UNIX); taken.bind(name); taken.listen(); "
        "print('taken', flush=True); caller, _ = taken.accept(); "
        """caller.sendall(b'{"pki": "/evil", "private": true}'); caller.close(); """
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", squat], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"taken\n"
        assert find_own_master(here) is None
        assert choose_endpoint(here, None, insecure=False).credentials is None
        squatter.communicate(timeout=PATIENCE_S)


def test_what_is_named_comes_before_what_is_found(tmp_path: Path, here: str) -> None:
    make_authority(tmp_path / "pki", ())
    operator = read_credentials(tmp_path / "pki" / "operator")
    issue(tmp_path / "pki", tmp_path / "named", "viewer", "ann")
    with announced(here, OwnMaster(pki=tmp_path / "pki", private=True)):
        assert choose_endpoint(here, None, insecure=False).credentials == operator
        named = choose_endpoint(here, tmp_path / "named", insecure=False)
        assert named.credentials == read_credentials(tmp_path / "named")
        assert choose_endpoint(here, None, insecure=True).credentials is None
        (tmp_path / "pki" / "operator" / "client.key").chmod(0o644)
        with pytest.raises(ValueError, match=r"runs as you, but its operator's .* chmod 600"):
            choose_endpoint(here, None, insecure=False)
        (tmp_path / "pki").rename(tmp_path / "away")  # as seen from a container
        assert choose_endpoint(here, None, insecure=False).credentials is None


def test_an_agent_beside_its_user_s_master_signs_for_itself(tmp_path: Path, here: str) -> None:
    make_authority(tmp_path / "pki", ())
    with announced(here, OwnMaster(pki=tmp_path / "pki", private=True)):
        holder = choose_way(here, "n7", None, None, insecure=False)
        again = choose_way(here, "n7", None, None, insecure=False)
    assert holder.credentials is not None
    told = pki.identity_of(holder.credentials.certificate)
    assert (told.role, told.name, holder.own_user_alone) == ("agent", "n7", True)
    assert again.credentials == holder.credentials
    with announced(here, OwnMaster(pki=tmp_path / "pki", private=False)):
        assert not choose_way(here, "n7", None, None, insecure=False).own_user_alone
        clear = choose_way(here, "n7", None, None, insecure=True)
    assert (clear.folder, clear.own_user_alone) == (None, False)
    alone = choose_way(here, "n7", None, None, insecure=False)
    assert (alone.folder, alone.own_user_alone) == (None, False)


def test_credentials_that_end_soon_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_authority(tmp_path / "pki", ())
    folder = tmp_path / "n1"
    monkeypatch.setattr(signing, "_LIFE_S", 60.0)
    issue(tmp_path / "pki", folder, "agent", "n1")
    monkeypatch.undo()
    first = read_credentials(folder)
    have_issued(tmp_path / "pki", folder, "agent", "n1")
    second = read_credentials(folder)
    assert (second.key, second.certificate != first.certificate) == (first.key, True)
    assert pki.expiry(second.certificate) > time.time() + 300 * 86_400
    have_issued(tmp_path / "pki", folder, "agent", "n1")
    assert read_credentials(folder) == second


def test_what_leads_to_it_is_known_by_its_certificate(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        make_authority(tmp_path / name, ())
    mine, other = (OwnMaster(pki=tmp_path / name, private=True) for name in ("mine", "other"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(mine.pki / "master.crt", mine.pki / "master.key")
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as showing:

        def show() -> None:
            while True:
                try:
                    caller, _ = listening.accept()
                except OSError:
                    return
                with caller, contextlib.suppress(OSError):
                    context.wrap_socket(caller, server_side=True).close()

        shown = showing.submit(show)
        port = listening.getsockname()[1]
        with announced(f"127.0.0.8:{port}", other):
            assert find_own_master(f"127.0.0.1:{port}") is None
            with announced(f"127.0.0.9:{port}", mine):
                assert find_own_master(f"127.0.0.1:{port}") == mine
        listening.shutdown(socket.SHUT_RDWR)
        shown.result(PATIENCE_S)

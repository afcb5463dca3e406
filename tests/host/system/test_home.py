"""A user without a home directory, as containers have them."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.host.system.files import below_home

#: A command in a process whose user is in no list of users.
_HOMELESS = """
import os, pwd, sys
os.environ.pop("HOME", None)
def unknown(uid):
    raise KeyError(uid)
pwd.getpwuid = unknown
from oobleck.host.programs import oobleck
sys.argv = ["oobleck", *sys.argv[1:]]
oobleck()
"""


@pytest.fixture
def _homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("_homeless")
def test_what_lies_below_no_home_is_refused_with_the_fix() -> None:
    assert below_home("/srv/pki") == Path("/srv/pki")
    with pytest.raises(ValueError, match=r"^~/x: .* no home directory; set the variable HOME"):
        below_home("~/x")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("local --nodes 1 --listen 127.0.0.1:0", "~/.oobleck/local"),
        ("pki init", "~/.oobleck/pki"),
        ("dashboard token --role viewer", "~/.local/state"),
    ],
)
def test_a_command_says_so_in_one_line(command: str, key: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XDG_")}
    done = subprocess.run(
        [sys.executable, "-c", _HOMELESS, *command.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"oobleck: {key}: this process's user has no home directory; set the")
    assert not list(tmp_path.iterdir()), "no folder called ~"

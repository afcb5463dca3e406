"""The pins and their hashes: all that is installed here, and what Oobleck alone needs."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.audit import conclude
from support.pins import BUILDS, DEVELOP, PINS, ROOT, RUN, closure, hashes, pinned

HOW = "run 'make setup'; after a change of pyproject.toml or of a version also 'make lock'"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_every_package_that_is_installed_is_pinned() -> None:
    assert pinned(read(PINS)) == closure("dev"), HOW
    assert len(closure("dev")) > 100, "it looks at what packages need in their turn"


def test_every_pin_but_torch_has_hashes_and_is_in_one_file() -> None:
    run, develop = read(RUN), read(DEVELOP)
    assert not pinned(run).keys() & pinned(develop).keys()
    both = pinned(run) | pinned(develop)
    assert both.keys() == pinned(read(PINS)).keys() - BUILDS
    assert both.items() <= pinned(read(PINS)).items()
    assert pinned(run).keys() == closure().keys() - BUILDS, "what `oobleck up` sends to hosts"
    found = hashes(run) | hashes(develop)
    assert found.keys() == both.keys()
    assert all(found.values()), "pip takes no file that has no hash"
    assert not re.search(r"://|--(extra-)?index|--find", run + develop + read(PINS)), "hosts' own"


def test_pip_refuses_a_file_that_is_another_one(tmp_path: Path) -> None:
    """What installs from these files asks for hashes, so one byte more is refused."""
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr(
            "tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"
        )
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    (tmp_path / "pins.txt").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    for text in (read("Makefile"), read("deploy/Containerfile"), read("docs/deploy/systemd.md")):
        (line,) = re.findall(
            r"pip install (.*--require-hashes.*) (?:-r|--requirement) require", text
        )
        options = [word for word in line.split() if word != "--quiet"]
        command = [sys.executable, "-m", "pip", "install", *options, "--no-index", "--dry-run"]
        command += ["--find-links", str(tmp_path), "-r", str(tmp_path / "pins.txt")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "DO NOT MATCH THE HASHES" in done.stderr
        assert done.returncode == 1


@pytest.mark.parametrize("name", ["constraints.txt", "requirements.txt"])
def test_hosts_get_the_release_s_own_pins(name: str) -> None:
    assert (ROOT / "cli" / "ssh" / name).read_text() == read(name)


def test_an_audit_names_the_pins_that_no_index_knows_and_is_none_if_it_knows_none() -> None:
    def told(**found: list[str] | None) -> tuple[bool, str]:
        pins = [
            {"name": name, "skip_reason": "not found"}
            if ids is None
            else {"name": name, "vulns": [{"id": one} for one in ids]}
            for name, ids in found.items()
        ]
        return conclude(json.dumps({"dependencies": pins}), "pypi")

    assert told(torch=[], click=[]) == (True, "no known vulnerability")
    is_well, line = told(torch=[], own=None)
    assert is_well
    assert "no known vulnerability; not looked up" in line
    assert line.endswith(": own")
    is_well, line = told(torch=None, click=None)
    assert not is_well
    assert "ADVISORIES=osv" in line
    is_well, line = told(torch=["CVE-1", "CVE-2"], own=None, click=[])
    assert not is_well
    assert "torch: CVE-1, CVE-2" in line
    assert "click" not in line

"""What users are told to install is what this project needs, by names that are its own.

The package index has a project `oobleck` that is somebody else's: who asks pip for that name, with
or without an extra, gets foreign software.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "core",
    "planner",
    "proto",
    "host",
    "master",
    "agent",
    "worker",
    "cli",
    "bench",
    "deploy",
    "docs",
)
_FOREIGN = re.compile(r"\boobleck\[|pip install (?:-\S+ +)*[\"']*oobleck\b(?!-cluster)")
_NAMED = re.compile(r"pip install '([^']+)'")


def texts() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".service"):
                yield path


def test_nobody_is_told_to_install_what_is_somebody_elses() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts()
        for match in _FOREIGN.finditer(path.read_text())
    ]
    assert found == []


def test_what_hints_name_is_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = (".", project["name"])
    asked = {*extras["huggingface"], *extras["lora"]}
    asked |= {f"{name}[{extra}]" for name in names for extra in extras}
    named = {match for path in texts() for match in _NAMED.findall(path.read_text())}
    assert named <= asked
    assert len(named) >= 3


@pytest.mark.parametrize(
    "text", ["pip install 'oobleck[huggingface]'", "pip install oobleck", "pip install -U oobleck"]
)
def test_the_search_finds_it(text: str) -> None:
    assert _FOREIGN.search(text)

"""Ctrl-C while a program is still being loaded ends it quietly."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.folders import ROOT

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
#: The first thing that every program loads of others.
STRIKE = """
import signal, sys

class Strike:
    def find_spec(self, name, *rest):
        if name == "click":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Strike())
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_as_it_is_installed(script: str) -> None:
    module, _, function = SCRIPTS[script].partition(":")
    code = f"{STRIKE}\nfrom {module} import {function}\nsys.exit({function}())"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "")


def test_as_a_child_of_a_local_cluster(tmp_path: Path) -> None:
    (tmp_path / "loading.py").write_text(STRIKE + "import click\n")
    ended = subprocess.run(
        [sys.executable, "-m", "oobleck.host.programs", str(os.getpid()), "loading"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, "")

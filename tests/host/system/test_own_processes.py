"""Processes of ours do not import from the current folder."""

import re

import pytest

from support.folders import ROOT

#: A command that begins with this Python, and the option that comes first.
_COMMAND = re.compile(r"\[\s*sys\.executable,\s*(\S+?),|\"python\"\),\s*(\S+?),")


@pytest.mark.parametrize("folder", ["agent", "cli", "host", "master", "oobleck", "worker"])
def test_every_command_with_python_leaves_the_current_folder_out(folder: str) -> None:
    found = {
        path: option
        for path in (ROOT / folder).rglob("*.py")
        for options in _COMMAND.findall(path.read_text())
        for option in filter(None, options)
    }
    assert set(found.values()) <= {'"-P"', '"-I"'}, found
    if folder in ("cli", "host"):
        assert found, "it has such commands"

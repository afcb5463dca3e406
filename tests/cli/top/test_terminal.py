"""`oobleck top` as a process on a real terminal: what it needs, and what it leaves behind."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

from oobleck.cli.main import oobleck
from oobleck.cli.top import top as command
from support.commands import refused, run
from support.waiting import PATIENCE_S

#: Turned on for the page: the other screen, mouse and paste; and a cursor that is not shown.
_MODES = ("?1049", "?1000", "?1003", "?2004")


#: One of the terminal's own.
_COLOUR = re.compile(r"\x1b\[([0-9]+;)*3[1-7][;m]")


class Terminal:
    """A pseudo-terminal with the command on it."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] = {}) -> None:
        self._main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._other = other
        self.before = termios.tcgetattr(other)
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "oobleck.cli.main", "top", *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm-256color", "NO_COLOR": "", **environment},
            start_new_session=True,
        )

    def see(self, wanted: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self.said:
            ready, _, _ = select.select([self._main], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, self.said
            self.said += os.read(self._main, 1 << 16).decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def end(self) -> int:
        """The exit code; by then the terminal is as it was."""
        os.set_blocking(self._main, False)
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.process.poll()) is None or self._more():
            assert time.monotonic() < deadline, self.said
            self._more()
            time.sleep(0.01)
        assert termios.tcgetattr(self._other) == self.before
        for mode in _MODES:
            on, off = self.said.rfind(f"\x1b[{mode}h"), self.said.rfind(f"\x1b[{mode}l")
            assert on < off, f"{mode} is left on"
        assert self.said.rfind("\x1b[?25l") < self.said.rfind("\x1b[?25h"), "the cursor is back"
        os.close(self._main)
        os.close(self._other)
        return code

    def _more(self) -> bool:
        try:
            part = os.read(self._main, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            return False
        self.said += part
        return bool(part)


def test_keys_are_obeyed_and_the_terminal_is_given_back(master: str) -> None:
    terminal = Terminal("--master", master)
    terminal.see("no jobs; queue one")
    terminal.type("c")
    terminal.see("no job to cancel")
    terminal.type("q")
    assert terminal.end() == 0
    assert _COLOUR.search(terminal.said)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)],
)
def test_a_signal_gives_the_terminal_back_too(master: str, number: int, code: int) -> None:
    terminal = Terminal("--master", master, environment={"NO_COLOR": "1"})
    terminal.see("no jobs; queue one")
    terminal.process.send_signal(number)
    assert terminal.end() == code
    assert not _COLOUR.search(terminal.said)


def test_what_it_needs_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    assert "standard input, output and error must be a terminal" in refused(run("top"), 2)
    monkeypatch.setattr(command, "_check_terminal", lambda: None)
    assert find_spec("textual") is not None
    monkeypatch.setitem(sys.modules, "textual", None)
    told = CliRunner().invoke(oobleck, ["top", "--master", master])
    assert told.exit_code == 1
    assert "pip install 'oobleck-cluster[top]'" in told.stderr
    monkeypatch.undo()
    monkeypatch.setenv("TERM", "dumb")
    told = CliRunner().invoke(oobleck, ["top", "--master", master])
    assert (told.exit_code, told.stdout) == (2, "")
    assert "'oobleck status --watch' needs none" in told.stderr


def test_a_job_or_a_master_that_is_not_there_is_told_before_there_is_a_page(
    monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.setattr(command, "_check_terminal", lambda: None)
    for arguments, code in (
        ((*("none-1", "--master"), master), 3),
        (("--master", "127.0.0.1:1"), 4),
    ):
        assert CliRunner().invoke(oobleck, ["top", *arguments]).exit_code == code

"""Which signals end a daemon, and how long a command is waited for."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from oobleck.host.system.process import end_signals, output_of


def test_the_end_of_a_terminal_counts_unless_it_was_ignored_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert end_signals() == (signal.SIGINT, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert end_signals() == (signal.SIGINT,)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_does_not_end_though_it_is_killed_is_not_waited_for(tmp_path: Path) -> None:
    """Its output stays open in a process that it has left behind."""
    left = tmp_path / "left"
    command = ["sh", "-c", f"sleep 60 & echo $! > {left}.new; mv {left}.new {left}; wait"]
    with pytest.raises(subprocess.TimeoutExpired):
        output_of(command, 0.3)
    os.kill(int(left.read_text()), signal.SIGKILL)  # it is still there


def test_what_a_command_prints_or_why_it_failed() -> None:
    command = ["sh", "-c", "echo $WORD; echo why >&2; exit $CODE"]
    assert output_of(command, 60, {"WORD": "well", "CODE": "0"}) == b"well\n"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        output_of(command, 60, {"CODE": "3"})
    assert (failed.value.returncode, failed.value.stderr) == (3, b"why\n")

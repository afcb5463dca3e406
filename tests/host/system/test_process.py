"""Which signals end a daemon, and how long a command is waited for."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from oobleck.host.system.process import end_signals, output_of
from support.waiting import all_gone


def test_the_end_of_a_terminal_counts_unless_it_was_ignored_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert end_signals() == (signal.SIGINT, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert end_signals() == (signal.SIGINT,)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_hangs_is_killed_with_all_that_it_has_started_and_not_waited_for(
    tmp_path: Path,
) -> None:
    """Its output stays open in a process that has left its session."""
    started = tmp_path / "started"
    script = f"sleep 60 & echo $! > {started}; setsid sleep 60 & echo $! >> {started}; wait"
    with pytest.raises(subprocess.TimeoutExpired):
        output_of(["sh", "-c", script], 1.0)
    own, left = map(int, started.read_text().split())
    with suppress(psutil.NoSuchProcess):
        all_gone([psutil.Process(own)])
    os.kill(left, signal.SIGKILL)  # it is still there


def test_what_a_command_prints_or_why_it_failed() -> None:
    command = ["sh", "-c", "echo $WORD; echo why >&2; exit $CODE"]
    assert output_of(command, 60, {"WORD": "well", "CODE": "0"}) == b"well\n"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        output_of(command, 60, {"CODE": "3"})
    assert (failed.value.returncode, failed.value.stderr) == (3, b"why\n")

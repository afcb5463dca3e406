"""Starting the real command and master, for tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from bench.support.ports import choose_address
from support.forked import Forked, run_forked
from support.waiting import PATIENCE_S


def run(
    *arguments: str, timeout_s: float = 2 * PATIENCE_S, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`oobleck ARGUMENTS`, as a process; `environment` comes on top of this one's, and has the
    command started from the beginning, since it may say how."""
    if environment is None:
        return run_forked("oobleck", *arguments, timeout_s=timeout_s)
    return subprocess.run(
        [sys.executable, "-m", "oobleck.cli.main", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line of an error with exit code `code`."""
    assert result.returncode == code, result
    assert result.stdout == ""
    lines = result.stderr.strip().split("\n")
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("oobleck: ")
    return lines[0]


def start_master(
    state_dir: Path,
    listen: str | None = None,
    *,
    crash_at: str = "",
    environment: Mapping[str, str] | None = None,
) -> tuple[Forked | subprocess.Popen[str], str]:
    """`listen`: None for an address that the next master can have too; `crash_at`: a point of
    `oobleck.master.process` and how often it is passed; `environment`: as `run` takes it."""
    options = ["--listen", listen or choose_address(), "--state-dir", str(state_dir)]
    if crash_at:
        options += ["--crash-at", crash_at]
    process: Forked | subprocess.Popen[str]
    if environment is None:
        process = Forked("oobleck-master", *options)
    else:
        process = subprocess.Popen(
            [sys.executable, "-m", "oobleck.master", *options],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("listening on "):
        end(process)
        raise AssertionError(f"the master ended with {process.returncode} and said {line!r}")
    return process, line.split()[-1]


def start_agent(
    master: str, name: str, workers: int = 1, *, errors: int = subprocess.DEVNULL
) -> Forked:
    """Start the real agent, whose workers only pretend to train. `errors`: PIPE or DEVNULL."""
    read: Literal["stderr", ""] = "stderr" if errors == subprocess.PIPE else ""
    return Forked("standin-agent", master, name, str(workers), read=read)


def end(process: subprocess.Popen[str] | Forked) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()

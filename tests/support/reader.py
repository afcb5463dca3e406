"""A reader who types the lines of a page, each on the machine that it names."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.support.client import BIN
from bench.support.network import Network, unusable
from support.waiting import PATIENCE_S, until

#: What a daemon's log says once it is up.
UP = {"oobleck-master": "listening on", "oobleck-agent": "session began"}
_LINE = re.compile(r"^    (\w+)\$ (.+)$", re.MULTILINE)
_END = "the line has ended with"

Line = tuple[str, str]


def lines_of(page: Path, section: str) -> list[Line]:
    """Machine and line, in the page's order. `section`: its heading."""
    _, found, after = page.read_text().partition(section)
    assert found
    return _LINE.findall(re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0])


def shorten(job: Path, steps: int) -> None:
    """Let the job that `oobleck init` wrote train for so many steps, without a measurement."""
    text, found = re.subn(
        r"^  steps: .*$", f"  steps: {steps}", job.read_text(), flags=re.MULTILINE
    )
    assert found == 1
    job.write_text(f"{text}profile: estimate\n")


class Machine:
    """A reader's shell on a host."""

    def __init__(self, within: list[str], home: Path, path: str) -> None:
        #: A copy of this project is here, for the reader.
        self.folder = home / "oobleck"
        self.folder.mkdir(parents=True)
        self.home = home
        kept = {k: v for k, v in os.environ.items() if not k.startswith("OOBLECK_")}
        self._shell = subprocess.Popen(
            [*within, "bash"],
            cwd=self.folder,
            env={**kept, "HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0o022,
            start_new_session=True,
        )

    def type(self, line: str) -> str:
        """What the line prints; where it starts a daemon, once that is up. Several lines are pasted
        in one go. All must succeed, and in time: at the deadline they are killed, with all else
        that this shell has started."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"code=0; trap 'code=$?' ERR\n{line}\necho; echo {_END} $code\n")
        self._shell.stdin.flush()
        deadline = threading.Timer(PATIENCE_S, os.killpg, (self._shell.pid, signal.SIGKILL))
        deadline.start()
        told = ""
        try:
            while _END not in told:
                part = self._shell.stdout.readline()
                assert part, f"{line}\n{told}has not ended after {PATIENCE_S:g} s, or its shell has"
                told += part
        finally:
            deadline.cancel()
        assert told.endswith(f"{_END} 0\n"), f"{line}\n{told}"
        if line.endswith("&"):
            log = self.folder / line.split()[-3]
            (sign,) = (sign for program, sign in UP.items() if program in line)
            until(lambda: log.exists() and sign in log.read_text(), f"{sign!r} of '{line}'")
        return told

    def close(self) -> None:
        self._shell.kill()
        self._shell.communicate()


@contextmanager
def machines_at(names: Mapping[str, str], folder: Path) -> Iterator[dict[str, Machine]]:
    """Have a machine at each address of a page, in a network namespace of its own; `scp` there
    copies a file or folder into the home of another one. `names`: by address. Skips the test where
    there can be no namespaces."""
    if reason := unusable():
        pytest.skip(reason)
    homes, tools = folder / "homes", folder / "bin"
    tools.mkdir()
    (tools / "scp").write_text(f'#!/bin/sh\ncp -rp "$2" "{homes}/${{3%%:*}}/${{3#*:}}"\n')
    (tools / "scp").chmod(0o755)
    path = f"{tools}:{BIN}:{os.environ['PATH']}"
    with ExitStack() as stack:
        net = stack.enter_context(Network(list(names.values())))
        found = {}
        for address, name in names.items():
            found[address] = Machine(net.on(name), homes / net.address(name), path)
            stack.callback(found[address].close)
        yield found

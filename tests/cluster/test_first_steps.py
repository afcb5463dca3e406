"""docs/first-steps.md, line by line as a reader types it.

A block is what is typed and seen in one terminal, which its first line names. What is put in the
places of the page's own: the master's port, and process ids. README.md has what is typed alone.
"""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from bench.support.client import BIN
from bench.support.daemons import descendants
from bench.support.preloaded import Preloaded
from support.folders import ROOT
from support.waiting import PATIENCE_S, all_gone, until

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs" / "first-steps.md"
#: Of the terminals that are no other's.
ELSEWHERE = "shell"
_BLOCK = re.compile(r"^```console(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Not that of a name, as in n3.
_NUMBER = re.compile(r"(?<![a-z])\d[\d.,]*(?:e-\d+)?")
_PID = re.compile(r"\bpid (\d+)")
_END = "the line has ended with"


class Terminal:
    """A reader's shell, and what it has shown."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._seen = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        self._lines.extend(self._shell.stdout)

    def type(self, line: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{line}\necho {_END} $?\n")
        self._shell.stdin.flush()

    def see(self, shown: str) -> str:
        """Wait for a line that begins like the page's, whatever its numbers, its spaces and what is
        left out ("..."), below those that were waited for before; the line."""
        like = re.compile(r"\s+".join(_pattern(word) for word in shown.split()))
        found: list[str] = []

        def is_there() -> bool:
            for number, line in enumerate(self._lines[self._seen :], self._seen + 1):
                if like.match(line.strip()):
                    self._seen = number
                    found.append(line)
                    return True
            return False

        try:
            until(is_there, shown)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(self._lines)}") from error
        return found[0]

    def close(self) -> None:
        """Send Ctrl-C to what runs, and end the shell. Any of them may end by itself meanwhile."""
        processes = list(descendants(self._shell.pid))
        for process in processes[1:2]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT)
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        try:
            self._shell.wait(PATIENCE_S)
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._reader.join()
            assert self._shell.stdout is not None
            self._shell.stdout.close()
            all_gone(processes)


def _pattern(word: str) -> str:
    if word == "...":
        return ".*"
    return _NUMBER.pattern.join(re.escape(part) for part in _NUMBER.split(word))


class Terminals:
    """Those that the page names; each has what a reader's has, and the master's address."""

    def __init__(self, home: Path, python_path: str, stack: ExitStack) -> None:
        self._folder = home / "job"
        self._folder.mkdir()
        kept = {name: value for name, value in os.environ.items() if "OOBLECK" not in name}
        path = f"{BIN}:{os.environ['PATH']}"
        own = {"HOME": str(home), "PATH": path, "PYTHONPATH": python_path}
        self._environment = kept | own | {"OMP_NUM_THREADS": "1"}
        self._stack = stack
        self._open: dict[str, Terminal] = {}
        #: Where the master is; the page's process ids, and those here.
        self._master = ""
        self._pids: dict[str, str] = {}

    def follow(self, name: str, lines: list[str]) -> None:
        if name not in self._open:
            self._open[name] = Terminal(self._folder, self._environment)
            self._stack.callback(self._open[name].close)
        terminal = self._open[name]
        for number, line in enumerate(lines, 1):
            if line.startswith("$ "):
                terminal.type(self._here(line.removeprefix("$ ")))
            else:
                self._learn(line, terminal.see(line))
            done = number == len(lines) or lines[number].startswith("$ ")
            if done and name == ELSEWHERE:
                assert terminal.see(f"{_END} 0").endswith(" 0\n"), line

    def _here(self, line: str) -> str:
        if line.startswith("oobleck local"):
            return f"{line} --listen 127.0.0.1:0"
        if line.startswith("oobleck"):
            return f"{self._master} {line}"
        return re.sub(r"\b\d{4}\b", lambda pid: self._pids[pid[0]], line)

    def _learn(self, shown: str, seen: str) -> None:
        if told := _PID.search(shown):
            found = _PID.search(seen)
            assert found is not None
            self._pids[told[1]] = found[1]
        if shown.startswith("master "):
            self._master = f"OOBLECK_MASTER={seen.split()[1]}"


@pytest.fixture
def terminals(tmp_path: Path, preloaded: Preloaded) -> Iterator[Terminals]:
    with ExitStack() as stack:
        yield Terminals(tmp_path, preloaded.python_path, stack)


@pytest.mark.timeout(900)
def test_the_page_is_true(terminals: Terminals) -> None:
    blocks = _BLOCK.findall(PAGE.read_text())
    assert len(blocks) == PAGE.read_text().count("```console")
    assert {name for name, _ in blocks} == {"", "cluster", "training"}
    for name, text in blocks:
        terminals.follow(name or ELSEWHERE, text.splitlines())

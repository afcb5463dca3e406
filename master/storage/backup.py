"""Reads one consistent point of a state directory while the master goes on writing to it.

The point is a length of the journal, and nobody waits for it. The order of three looks does it:

- The lengths of all `events.jsonl` are taken before the journal's. So no file has a line that the
  journal lacks, and a restart makes the lines that a file lacks. Lines of before the journal's
  snapshot are in the files, since compaction syncs them first.
- The journal's length is taken between two iterations of the master, so at the end of a commit. If
  compaction has put another journal in place since the first look, all begins anew.
- The lengths of `metrics.jsonl` and `evaluations.jsonl`, which only grow, are taken after that.
  They may be ahead of the journal, as after a crash.

Profiles and wheels appear whole, and are read last. Wheels that are there at the first look are
opened then, since a job that ends takes its wheel along. Files that grow are cut at the end of a
line. Must not know gRPC, nor who receives the files.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from oobleck.host.storage.backup import JOURNAL, PART_BYTES, whole_lines
from oobleck.host.system.files import open_regular

_EVENTS = "jobs/*/events.jsonl"
_RECORDS = ("jobs/*/metrics.jsonl", "jobs/*/evaluations.jsonl")
_WHEELS = "code/*.whl"
_PROFILES = "profiles/*.json"
_OUTPUT = "jobs/*/logs/*.log"


class Part(NamedTuple):
    """Part of a file in a backup."""

    #: Where the file lies in the backup, in its first part; empty in the others.
    path: str
    data: bytes
    #: Of the whole file, in its last part; empty in the others.
    sha256: str


class Capture:
    """The files of one backup. `look` and `parts` block; `fix` does not."""

    def __init__(self, state_dir: Path, *, output: bool) -> None:
        """`output`: include what workers print."""
        self._root = state_dir
        self._output = output
        self._open = ExitStack()

    def look(self) -> None:
        """Open the journal, and measure the files that may not be ahead of it. Raises OSError."""
        self._open.close()
        self._journal = self._open.enter_context(open_regular(self._root / JOURNAL, buffering=0))
        self._wheels: dict[str, BinaryIO] = {}
        for path in self._found(_WHEELS):
            with suppress(FileNotFoundError):
                self._wheels[self._name(path)] = self._open.enter_context(open_regular(path))
        self._events = dict(self._lengths([_EVENTS]))

    def fix(self) -> bool:
        """Take the journal's length, and return whether it is the one that `look` found. The caller
        makes sure that no commit is under way. Raises OSError."""
        found = os.fstat(self._journal.fileno())
        self._journal_bytes = found.st_size
        return os.path.samestat(found, os.stat(self._root / JOURNAL))

    def parts(self) -> Iterator[Part]:
        """Yield all files, the journal first. Raises OSError."""
        lengths = self._events | dict(self._lengths(_RECORDS))
        yield from _parts_of(JOURNAL, self._journal, self._journal_bytes)
        for name, file in self._wheels.items():
            yield from _parts_of(name, file, _size(file))
        for path in self._found(_WHEELS, _PROFILES):
            if (name := self._name(path)) not in self._wheels:
                with suppress(FileNotFoundError), open_regular(path) as file:
                    yield from _parts_of(name, file, _size(file))
        for name, length in sorted(lengths.items()):
            with open_regular(self._root / name) as file:
                yield from _parts_of(name, file, length)
        for path in self._found(_OUTPUT) if self._output else ():
            yield from self._log(path)

    def close(self) -> None:
        self._open.close()

    def _found(self, *patterns: str) -> list[Path]:
        return sorted(path for pattern in patterns for path in self._root.glob(pattern))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _lengths(self, patterns: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield the name of each file, and how many bytes of it are whole lines."""
        for path in self._found(*patterns):
            with open_regular(path) as file:
                yield self._name(path), whole_lines(file)

    def _log(self, path: Path) -> Iterator[Part]:
        """Yield a log, and the full one before it. If the first has just become the second, it is
        yielded once."""
        before = path.with_suffix(".log.1")
        with ExitStack() as opened:
            files: dict[str, BinaryIO] = {}
            for each in (path, before):
                with suppress(FileNotFoundError):
                    files[self._name(each)] = opened.enter_context(open_regular(each))
            if len({os.fstat(file.fileno()).st_ino for file in files.values()}) < len(files):
                del files[self._name(before)]
            for name, file in files.items():
                yield from _parts_of(name, file, whole_lines(file))


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _parts_of(path: str, file: BinaryIO, size: int) -> Iterator[Part]:
    """Yield the first `size` bytes of an open file."""
    hashed = hashlib.sha256()
    file.seek(0)
    data = file.read(min(size, PART_BYTES))
    while True:
        hashed.update(data)
        size -= len(data)
        following = file.read(min(size, PART_BYTES)) if data else b""
        if not following:
            yield Part(path, data, hashed.hexdigest())
            return
        yield Part(path, data, "")
        path, data = "", following

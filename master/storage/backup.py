"""Backup of a state directory while the master keeps writing to it, and its restoration.

A backup is one consistent point, a length of the journal, and delays nothing:

- The lengths of all `events.jsonl` are taken before the journal's. So no file has a line that the
  journal lacks; lines that a file lacks are made again at the start.
- The journal's length is taken between two iterations of the master, so at the end of a commit. If
  compaction has replaced the journal since `look`, the backup begins anew.
- The lengths of `metrics.jsonl` and `evaluations.jsonl` come last, and may be ahead, as after a
  crash.

Profiles and wheels are created atomically; wheels are opened in `look`, since a job that ends
removes its own. Files that grow are cut at the end of a line.

All of a backup is checked before anything is restored. While files are copied, the directory has
the file `restoring`, and no master starts on it; the next `--restore` begins anew. Must not know
gRPC, who receives the files, nor the journal's events.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from oobleck.host.storage.backup import (
    AUTHORITY,
    FOLDERS,
    JOURNAL,
    PART_BYTES,
    SUMMARY,
    InvalidBackup,
    Summary,
    read_file,
    read_summary,
    whole_lines,
)
from oobleck.host.system.files import open_regular, sync_directory
from oobleck.master.config import Unusable
from oobleck.master.storage.disk import storing

_EVENTS = "jobs/*/events.jsonl"
_RECORDS = ("jobs/*/metrics.jsonl", "jobs/*/evaluations.jsonl")
_WHEELS = "code/*.whl"
_PROFILES = "profiles/*.json"
_OUTPUT = "jobs/*/logs/*.log"
_UNDER_WAY = "restoring"
#: Entries of a directory that counts as empty: the master's lock, an operator's authority, and the
#: folder of a new file system.
_ALLOWED = frozenset({"lock", AUTHORITY, "lost+found"})


class Part(NamedTuple):
    """Part of a file in a backup."""

    #: Path of the file in the backup, in its first part; empty in the others.
    path: str
    data: bytes
    #: Hash of the whole file, in its last part; empty in the others.
    sha256: str


class Capture:
    """Files of one backup. `look` and `parts` block; `fix` does not."""

    def __init__(self, state_dir: Path, *, output: bool) -> None:
        """Begin a backup of `state_dir`. `output`: include the output of workers."""
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
        """Take the journal's length, and return whether it is still the journal that `look` opened.
        Must not run during a commit. Raises OSError."""
        opened = os.fstat(self._journal.fileno())
        self._journal_bytes = opened.st_size
        return os.path.samestat(opened, os.stat(self._root / JOURNAL))

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
        """Yield the name of each file, and its bytes in whole lines."""
        for path in self._found(*patterns):
            with open_regular(path) as file:
                yield self._name(path), whole_lines(file)

    def _log(self, path: Path) -> Iterator[Part]:
        """Yield a log and the full one before it; only one if the first has just become the
        second."""
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


def check_target(state_dir: Path, backup: Path) -> None:
    """Check that the backup may be restored into the directory. Raises Unusable."""
    if backup.resolve() in state_dir.resolve().parents:
        raise Unusable(
            f"--state-dir {state_dir} is inside the backup {backup}; choose one outside of it"
        )
    try:
        names = {path.name for path in state_dir.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"--state-dir {state_dir} cannot be read ({error.strerror}); choose another one"
        raise Unusable(text) from error
    if _UNDER_WAY in names:
        return
    if more := sorted(names - _ALLOWED):
        raise Unusable(
            f"--state-dir {state_dir} is not empty (it has {more[0]}); restore into another one, "
            "or leave --restore out to go on from what is there"
        )


def check_started(state_dir: Path) -> None:
    """Check that no restore was cut off, and that the directory is no backup. Raises Unusable."""
    if (state_dir / SUMMARY).exists():
        raise Unusable(
            f"--state-dir {state_dir} is a backup, which a master would change: name another "
            f"directory, and start with --restore {state_dir}"
        )
    if (state_dir / _UNDER_WAY).exists():
        raise Unusable(
            f"--state-dir {state_dir} has a part of a backup: its restore was cut off; start with "
            "--restore DIR again, or choose another one"
        )


def check_backup(backup: Path) -> Summary:
    """Read all of a backup. Raises Unusable."""
    try:
        summary = read_summary(backup)
        for name, expected in summary.files.items():
            for _ in read_file(backup, name, expected):
                pass
    except InvalidBackup as invalid:
        raise Unusable(f"--restore {invalid}; restore another backup") from invalid
    return summary


def brings_authority(summary: Summary, state_dir: Path) -> bool:
    """Return whether to restore the backup's authority: it has one, and the directory has none."""
    marker = state_dir / _UNDER_WAY
    left = marker.is_file() and marker.read_text() == AUTHORITY
    return summary.has_authority and (left or not (state_dir / AUTHORITY).exists())


def check_cluster(summary: Summary, cluster: str) -> None:
    """Raise Unusable unless the backup is of this `cluster`; empty: there is no authority here."""
    if summary.cluster and summary.cluster != cluster:
        missing = "there is no authority here" if not cluster else "the authority here is another"
        raise Unusable(
            f"--restore: the backup is of the cluster {summary.cluster[:16]}, and {missing}; copy "
            "the folder of that cluster's authority here, and name it with --pki"
        )


def restore(backup: Path, summary: Summary, state_dir: Path, *, authority: bool) -> None:
    """Copy a checked backup into a checked directory; the caller holds its lock. `authority`:
    include the backup's authority. Raises Unusable, StorageFailed."""
    marker = state_dir / _UNDER_WAY
    with storing(state_dir):
        if marker.exists():
            _clear(state_dir, authority=marker.read_text() == AUTHORITY)
        marker.write_text(AUTHORITY if authority else "")
        sync_directory(state_dir)
    folders = {state_dir}
    # The journal is restored last.
    for name in sorted(summary.files, key=lambda name: (name == JOURNAL, name)):
        if name.startswith(f"{AUTHORITY}/") and not authority:
            continue
        target = state_dir / name
        with storing(target):
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folders |= {folder for folder in target.parents if state_dir in folder.parents}
            _copy(read_file(backup, name, summary.files[name]), target)
    with storing(state_dir):
        for folder in folders:
            sync_directory(folder)
        marker.unlink()
        sync_directory(state_dir)


def _copy(content: Iterator[bytes], target: Path) -> None:
    """Copy the content to a new file on disk. Raises OSError, Unusable."""
    try:
        with open(target, "xb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
    except InvalidBackup as invalid:
        raise Unusable(f"--restore {invalid}; it has just been changed") from invalid


def _clear(state_dir: Path, *, authority: bool) -> None:
    """Remove the remains of a cut-off restore. Raises OSError."""
    for name in FOLDERS:
        if name != AUTHORITY or authority:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(state_dir / name)
    (state_dir / JOURNAL).unlink(missing_ok=True)

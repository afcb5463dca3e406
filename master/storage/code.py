"""Wheels of jobs on the master's disk, each by its hash; what is in one is for nodes to check.

A file appears when it is whole. Must not know jobs.
"""

import hashlib
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from oobleck.core.job.wheel import MOST_WHEEL_BYTES
from oobleck.host.system.files import open_regular, sync_directory
from oobleck.master.storage.disk import storing

#: Of all wheels together.
_MOST_BYTES = 1 << 30
#: A wheel comes before its job: one that no job names stays for so long.
_UNNAMED_S = 600.0


class CodeFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def has(self, digest: str) -> bool:
        """Return whether the wheel is stored. If so, keep it for a while longer, since a job that
        names it is about to come."""
        try:
            os.utime(self._path / f"{digest}.whl")
        except FileNotFoundError:
            return False
        return True

    def open(self, digest: str) -> BinaryIO | None:
        """Open the wheel; None: it is not stored."""
        try:
            return open_regular(self._path / f"{digest}.whl")
        except FileNotFoundError:
            return None

    def receive(self) -> "Receiving":
        """Raises StorageFailed, ValueError where there are too many."""
        with storing(self._path):
            self._path.mkdir(exist_ok=True)
            used = sum(map(_size, self._path.iterdir()))
        if used > _MOST_BYTES:
            raise ValueError(
                f"code: the wheels of jobs have {used >> 20} MiB on the master's disk, more than "
                f"{_MOST_BYTES >> 20}; submit the job when others have ended, or cancel some"
            )
        return Receiving(self._path)

    def remove_all_but(self, named: Collection[str], now: float) -> None:
        """`named`: hashes that jobs name which go on; `now`: by the clock of files."""
        if not self._path.exists():
            return
        for file in self._path.iterdir():
            if file.stem not in named and now - file.stat().st_mtime > _UNNAMED_S:
                file.unlink(missing_ok=True)


class Receiving:
    """A wheel that is coming; a context, which leaves nothing of one that is not kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = folder / f"coming-{secrets.token_hex(8)}"
        self._hash = hashlib.sha256()
        self._bytes = 0
        with storing(folder):
            self._file: BinaryIO = open(self._temporary, "xb")  # noqa: SIM115 - closed at the end

    def __enter__(self) -> "Receiving":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with storing(self._folder):
            self._temporary.unlink(missing_ok=True)
            self._file.close()

    def add(self, data: bytes) -> None:
        """Raises ValueError where it is too large, StorageFailed."""
        self._bytes += len(data)
        if self._bytes > MOST_WHEEL_BYTES:
            raise ValueError(
                f"code: the wheel has more than {MOST_WHEEL_BYTES} bytes; leave data out of it"
            )
        self._hash.update(data)
        with storing(self._folder):
            self._file.write(data)

    @property
    def digest(self) -> str:
        """The SHA-256 of what has come so far, in hexadecimal."""
        return self._hash.hexdigest()

    def keep(self) -> str:
        """Store the wheel durably, so that it survives a power failure, and return its hash. Raises
        StorageFailed."""
        digest = self.digest
        with storing(self._folder):
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self._folder / f"{digest}.whl")
            sync_directory(self._folder)
            sync_directory(self._folder.parent)
        return digest


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it has its name by now, or broke off
        return 0

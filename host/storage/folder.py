"""Folder of files on this machine or anywhere that fsspec reaches, as checkpoints need it.

A file appears when it is whole. On a local disk it is written under another name, synced and
renamed. A remote service shows it when it is closed, and perhaps late: write a manifest last, and
rely on a file only once its manifest exists. Must not know the content of files.
"""

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from oobleck.core.redact import redact
from oobleck.host.system.files import check_size, open_regular, read_regular, sync_directory

#: Bytes that are read and hashed at a time.
CHUNK_BYTES = 4 << 20
#: A folder with more names is not one of checkpoints.
_MOST_NAMES = 100_000

Content = bytes | memoryview


def is_remote(path: str) -> bool:
    """Return whether `path` is a URL other than a local file's."""
    return "://" in path and not path.startswith("file://")


class LocalFolder:
    """Folder of files. Names are relative to it and use `/`. All methods raise OSError."""

    def __init__(self, path: str | Path) -> None:
        #: Name given by the user, with its secrets hidden, for messages.
        self.url = str(path)
        self._path = Path(path)

    def below(self, name: str) -> "LocalFolder":
        """Return the folder `name` in this one, whether or not it exists."""
        return LocalFolder(self._path / name)

    def names(self) -> list[str]:
        """Return the sorted names directly in the folder; empty if there is no such folder."""
        try:
            with os.scandir(self._path) as entries:
                return bounded_names(entry.name for entry in entries)
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        # From Python 3.14 on Path.exists takes any error of the storage for an absence.
        try:
            os.stat(self._path / name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, name: str, *, most_bytes: int) -> bytes:
        """Read a file. Raises WrongFile if it is larger, or not a regular file."""
        return read_regular(self._path / name, most_bytes)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the file's content piece by piece."""
        with open_regular(self._path / name) as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def write(self, name: str, content: Iterable[Content]) -> None:
        """Make the file and its folders; it appears only when it is whole."""
        path = self._path / name
        _make_directory(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(temporary, "wb", buffering=0) as file:
                for part in content:
                    view = memoryview(part).cast("B")
                    while view:  # a nearly full disk writes only a part
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_directory(path.parent)

    def remove(self, name: str) -> None:
        """Remove the file, or folder with all its content, if it exists."""
        path = self._path / name
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                _remove_tree(path)
            else:
                path.unlink()


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except RecursionError as error:
        reason = "folders are nested too deeply in it; remove it by hand"
        raise OSError(errno.ELOOP, reason, str(path)) from error


def bounded_names(names: Iterable[str]) -> list[str]:
    """Return the names sorted. Raises OSError if there are too many."""
    found = list(itertools.islice(names, _MOST_NAMES + 1))
    if len(found) > _MOST_NAMES:
        raise OSError(errno.E2BIG, f"more than {_MOST_NAMES} names are in it")
    return sorted(found)


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, durably: they survive a power failure."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:  # a file, or a broken link
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error
    sync_directory(path.parent)


class RemoteFolder:
    """The same through fsspec, without renames and caches of listings."""

    def __init__(self, url: str, system: Any, path: str) -> None:
        self.url = redact(url)
        self._system = system
        self._path = path.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def below(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url.rstrip('/')}/{name}", self._system, self._at(name))

    def names(self) -> list[str]:
        with _as_os_errors(self.url):
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            return bounded_names(path.rstrip("/").rpartition("/")[2] for path in found)

    def exists(self, name: str) -> bool:
        with _as_os_errors(self.url):
            self._system.invalidate_cache()
            try:
                self._system.info(self._at(name))  # `exists` hides errors
            except FileNotFoundError:
                return False
            return True

    def read(self, name: str, *, most_bytes: int) -> bytes:
        path = self._at(name)
        with _as_os_errors(self.url):
            self._system.invalidate_cache()
            check_size(self._system.size(path) or 0, most_bytes)
            return bytes(self._system.cat_file(path))

    def chunks(self, name: str) -> Iterator[bytes]:
        with _as_os_errors(self.url), self._system.open(self._at(name), "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def write(self, name: str, content: Iterable[Content]) -> None:
        path = self._at(name)
        with _as_os_errors(self.url):
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._system.open(path, "wb") as file:
                for part in content:
                    file.write(part)

    def remove(self, name: str) -> None:
        with _as_os_errors(self.url), contextlib.suppress(FileNotFoundError):
            self._system.rm(self._at(name), recursive=True)


Folder = LocalFolder | RemoteFolder


def open_folder(path: str) -> Folder:
    """Open a folder. `path`: a local directory or an fsspec URL. Raises ValueError with the fix if
    fsspec does not support that protocol here."""
    if is_remote(path):
        return _open_remote(path)
    return LocalFolder(path.removeprefix("file://"))


def _open_remote(url: str) -> Folder:
    import fsspec

    protocol = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        text = (
            f"{url}: this machine cannot speak {protocol}: {error}; install the fsspec package for"
        )
        raise ValueError(f"{redact(text)} it on every node") from error
    return RemoteFolder(url, system, path)


@contextlib.contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Convert exceptions of any storage service to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        # Foreign code of any service: the caller handles all its errors as one kind.
        raise OSError(redact(f"{url}: {type(error).__name__}: {error}")) from error

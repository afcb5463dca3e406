"""Format of a backup: a folder with files of a state directory, and `backup.json`.

`backup.json` has the size and SHA-256 of every file. It is written last, so an incomplete backup
lacks it. Must not know masters, nor the copying of files.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from oobleck.core.codec import decode
from oobleck.host.security.credentials import AUTHORITY_KEY
from oobleck.host.system.files import open_regular, read_regular

SUMMARY = "backup.json"
JOURNAL = "journal.log"
#: Folders of a state directory whose files a backup may have. The last one has the authority.
FOLDERS = ("jobs", "profiles", "code", "pki")
AUTHORITY = "pki"
#: The only format so far; a reader refuses any other.
FORMAT = 1
PART_BYTES = 1 << 20
_PLAIN = re.compile(r"(?!\.{1,2}$)[^/\0]{1,255}")
_MOST_DEPTH = 8
#: Enough for a million files.
_MOST_SUMMARY_BYTES = 256 << 20


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `backup.json`."""

    format: int = FORMAT
    #: Release of the master.
    release: str = ""
    #: Id of the cluster's authority; empty: the master had none.
    cluster: str = ""
    #: Last event in the journal.
    sequence: int
    #: Unix time of the state in the backup.
    time: float
    #: True if it has the output of workers.
    output: bool
    #: By path in the backup.
    files: dict[str, StoredFile] = {}

    @property
    def has_authority(self) -> bool:
        """True if the backup has the cluster's authority, with its key."""
        return f"{AUTHORITY}/{AUTHORITY_KEY}" in self.files


class InvalidBackup(ValueError):
    """Error of a folder that is no whole backup; the text is one line that begins with a path."""


def check_path(path: str) -> str:
    """Return `path` if a backup may have a file there. Raises ValueError."""
    parts = path.split("/")
    plain = len(parts) <= _MOST_DEPTH and all(map(_PLAIN.fullmatch, parts))
    if not plain or (path != JOURNAL and (len(parts) < 2 or parts[0] not in FOLDERS)):
        raise ValueError(f"{path[:200]!r} is no file of a backup")
    return path


def read_summary(folder: Path) -> Summary:
    """Read a backup's summary. Raises InvalidBackup."""
    path = folder / SUMMARY
    try:
        summary = decode(Summary, read_regular(path, _MOST_SUMMARY_BYTES))
        for name in summary.files:
            check_path(name)
    except FileNotFoundError as error:
        raise InvalidBackup(f"{folder}: has no {SUMMARY}, so it is no backup or was cut") from error
    except OSError as error:
        raise InvalidBackup(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise InvalidBackup(f"{path}: {error}") from error
    if summary.format != FORMAT:
        raise InvalidBackup(f"{path}: format {summary.format} is of another release")
    if JOURNAL not in summary.files:
        raise InvalidBackup(f"{path}: names no {JOURNAL}")
    return summary


def read_file(folder: Path, name: str, expected: StoredFile) -> Iterator[bytes]:
    """Yield the content of a file, and raise InvalidBackup at its end if it is not as expected:
    until then the caller must not use it."""
    path = folder / name
    hashed, size = hashlib.sha256(), 0
    try:
        with open_regular(path) as file:
            while data := file.read(PART_BYTES):
                hashed.update(data)
                size += len(data)
                if size > expected.bytes:
                    break
                yield data
    except OSError as error:
        raise InvalidBackup(f"{path}: cannot be read ({error.strerror or error})") from error
    if size != expected.bytes:
        more = "more" if size > expected.bytes else "less"
        raise InvalidBackup(f"{path}: has {more} than the {expected.bytes} bytes in {SUMMARY}")
    if hashed.hexdigest() != expected.sha256:
        raise InvalidBackup(f"{path}: differs from {SUMMARY}; it was changed or is damaged")


def whole_lines(file: BinaryIO) -> int:
    """Return how many bytes of an open file are whole lines. Reads only its end."""
    end = file.seek(0, 2)
    while end > 0:
        start = max(0, end - PART_BYTES)
        file.seek(start)
        if (newline := file.read(end - start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0

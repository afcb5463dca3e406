"""Wheels of pure Python that go with jobs: their allowed content, and their unpacking.

A wheel comes from the submitter of a job, so it is not trusted. All its values are bounded before
they are used, and it is unpacked into a folder of its own, never installed. Must not know jobs.
"""

import hashlib
import io
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath

#: Most bytes of a wheel unpacked, and of its directory.
_MOST_BYTES = 512 << 20
_MOST_FILES = 20_000
_MOST_DIRECTORY_BYTES = 8 << 20
_MOST_METADATA_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20
#: Last record of a zip file without a comment: the size of its directory is at byte 12.
_END = struct.Struct("<4s8xII2x")
#: Precedes it in a zip file that is larger than any wheel may be.
_LARGE_END = b"PK\x06\x07"
_LARGE_END_BYTES = 20
_NATIVE = (".so", ".pyd", ".dll", ".dylib", ".a")
_NATIVE_VERSION = re.compile(r"\.so\.\d")
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_TAG = "py3-none-any"
_METADATA = re.compile(r"[^/]+\.dist-info/WHEEL")
_NO_WHEEL = "it is no wheel; make one of your package with 'pip wheel --no-deps'"


class Wheel:
    def __init__(self, content: bytes) -> None:
        """Read the wheel; raises ValueError, with the fix, if it may not go with a job."""
        self.content = content
        self.digest = hashlib.sha256(content).hexdigest()
        self._zip = _opened(content)
        entries = self._zip.infolist()
        self._files = [info for info in entries if not info.orig_filename.endswith("/")]
        _check_files(self._files)
        self._check_metadata()
        tops = {PurePosixPath(info.filename).parts[0] for info in self._files}
        #: Top-level modules and packages.
        self.modules = frozenset(
            top.removesuffix(".py") for top in tops if top.removesuffix(".py").isidentifier()
        )
        if not self.modules:
            raise ValueError("the wheel has no module; build it of a package with code")

    def _check_metadata(self) -> None:
        found = [info for info in self._files if _METADATA.fullmatch(info.filename)]
        if len(found) != 1 or found[0].file_size > _MOST_METADATA_BYTES:
            raise ValueError(_NO_WHEEL)
        lines = self._read(found[0]).decode("utf-8", "replace").splitlines()
        keys = [line.partition(":") for line in lines]
        said = {(key.strip().lower(), value.strip()) for key, _, value in keys}
        if ("tag", _TAG) not in said or ("root-is-purelib", "true") not in said:
            tags = ", ".join(sorted(value for key, value in said if key == "tag")) or "none"
            raise ValueError(
                f"its tag is {tags[:200]!a}, and only {_TAG} (pure Python) goes with a job; "
                "install it on every node"
            )

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        try:
            return self._zip.read(info)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise _damaged(error) from error

    def unpack(self, folder: Path) -> None:
        """Unpack into a new folder, which exists afterwards only on success. Raises OSError, and
        ValueError if the wheel is damaged."""
        folder.mkdir(mode=0o700)
        try:
            for info in self._files:
                self._unpack(info, folder)
        except BaseException:
            shutil.rmtree(folder)
            raise

    def _unpack(self, info: zipfile.ZipInfo, folder: Path) -> None:
        target = folder / info.filename
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"it has {info.filename!a} twice, or as a file and a folder; build it anew"
            ) from error
        try:
            # No more is read of an entry than its size in the directory, which is bounded.
            with open(descriptor, "wb") as file, self._zip.open(info) as packed:
                shutil.copyfileobj(packed, file, _CHUNK_BYTES)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise _damaged(error) from error


def _opened(content: bytes) -> zipfile.ZipFile:
    """Open a wheel and read its directory, after bounding the directory's size."""
    end = content[-_END.size :]
    large = content[-_END.size - _LARGE_END_BYTES :].startswith(_LARGE_END)
    if len(end) < _END.size or large or not end.startswith(b"PK\x05\x06"):
        raise ValueError(_NO_WHEEL)
    _, directory_bytes, _ = _END.unpack(end)
    if directory_bytes > _MOST_DIRECTORY_BYTES:
        raise ValueError(f"it has far more than {_MOST_FILES} files; leave data out of the wheel")
    try:
        return zipfile.ZipFile(io.BytesIO(content))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> ValueError:
    return ValueError(f"it is damaged ({str(error)[:200]!a}); build it anew")


def _check_files(files: list[zipfile.ZipInfo]) -> None:
    if len(files) > _MOST_FILES:
        raise ValueError(
            f"it has {len(files)} files, more than {_MOST_FILES}; leave data out of the wheel"
        )
    unpacked = sum(info.file_size for info in files)
    if unpacked > _MOST_BYTES:
        raise ValueError(
            f"it unpacks to {unpacked} bytes, more than {_MOST_BYTES}; leave data out of the wheel"
        )
    for info in files:
        _check_file(info)


def _check_file(info: zipfile.ZipInfo) -> None:
    name = info.orig_filename
    parts = name.split("/")
    if (
        not name.isprintable()
        or not name.isascii()
        or "\\" in name
        or any(part in ("", ".", "..") or len(part) > 200 for part in parts)
        or len(name) > 900
    ):
        raise ValueError(f"it has a file {name[:200]!a}, whose name is not plain; build it anew")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise ValueError(f"{name} in it is a link or no regular file; put the file itself there")
    if parts[0].endswith(".data"):
        raise ValueError(
            f"{name} in it is for an installation, and a job's wheel is not installed; put it into "
            "a package"
        )
    if name.lower().endswith(_NATIVE) or _NATIVE_VERSION.search(name.lower()):
        raise ValueError(
            f"{name} in it is not Python, and only pure Python goes with a job; install the wheel "
            "on every node"
        )
    if info.flag_bits & 1 or info.compress_type not in _PACKED:
        raise ValueError(f"{name} in it has a compression that no wheel uses; build it anew")

"""Wheels of pure Python that go with jobs: their allowed content, their unpacking, and how a job
names them by its key `code`.

A wheel comes from the submitter of a job, so it is not trusted. All its values are bounded before
they are used, and it is unpacked into a folder of its own, never installed. In a job file `code` is
a path; in a job that the master has, it is the wheel's hash, by which nodes fetch it. A node that
has unpacked the wheel trains an ordinary job, whose functions are in that folder.
"""

import dataclasses
import hashlib
import io
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeVar

from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec

#: Largest wheel.
MOST_WHEEL_BYTES = 64 << 20
#: Most bytes of a wheel unpacked, and of its directory.
_MOST_BYTES = 512 << 20
_MOST_FILES = 20_000
_MOST_DIRECTORY_BYTES = 8 << 20
_MOST_METADATA_BYTES = 64 << 10
#: Last record of a zip file without a comment: the size of its directory is at byte 12.
_END = struct.Struct("<4s8xII2x")
#: Precedes it in a zip file that is larger than any wheel may be.
_LARGE_END = b"PK\x06\x07"
_LARGE_END_BYTES = 20
_NATIVE = re.compile(r"\.(so|pyd|dll|dylib|a)$|\.so\.\d", re.IGNORECASE)
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_TAG = "py3-none-any"
_METADATA = re.compile(r"[^/]+\.dist-info/WHEEL")
_NO_WHEEL = "it is no wheel; make one of your package with 'pip wheel --no-deps'"
_STORED = re.compile("sha256:([0-9a-f]{64})")

S = TypeVar("S", OwnModelSpec, DataSpec, OptimizerSpec)


class Wheel:
    """A wheel that may go with a job."""

    def __init__(self, content: bytes) -> None:
        """Read the wheel; raises ValueError, with the fix, if it may not go with a job."""
        self.content = content
        self.digest = hashlib.sha256(content).hexdigest()
        _check_end(content)
        with _damage_refused():
            self._zip = zipfile.ZipFile(io.BytesIO(content))
        entries = self._zip.infolist()
        self._files = [info for info in entries if not info.orig_filename.endswith("/")]
        _check_files(self._files)
        self._check_metadata()
        tops = {PurePosixPath(info.filename).parts[0].removesuffix(".py") for info in self._files}
        #: Top-level modules and packages.
        self.modules = frozenset(top for top in tops if top.isidentifier())
        if not self.modules:
            raise ValueError("the wheel has no module; build it of a package with code")

    def _check_metadata(self) -> None:
        found = [info for info in self._files if _METADATA.fullmatch(info.filename)]
        if len(found) != 1 or found[0].file_size > _MOST_METADATA_BYTES:
            raise ValueError(_NO_WHEEL)
        with _damage_refused():
            lines = self._zip.read(found[0]).decode("utf-8", "replace").splitlines()
        keys = [line.partition(":") for line in lines]
        said = {(key.strip().lower(), value.strip()) for key, _, value in keys}
        if ("tag", _TAG) not in said or ("root-is-purelib", "true") not in said:
            tags = ", ".join(sorted(value for key, value in said if key == "tag")) or "none"
            raise ValueError(
                f"its tag is {tags[:200]!a}, and only {_TAG} (pure Python) goes with a job; "
                "install it on every node"
            )

    def unpack(self, folder: Path) -> None:
        """Unpack into a new folder, which exists only on success. Raises OSError, ValueError."""
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
        # No more is read of an entry than its size in the directory, which is bounded.
        with open(descriptor, "wb") as file, _damage_refused(), self._zip.open(info) as packed:
            shutil.copyfileobj(packed, file)


def stored_as(digest: str) -> str:
    """Return `code` of a job whose wheel has that SHA-256 (hex)."""
    return f"sha256:{digest}"


def digest_of(code: str | None) -> str | None:
    """Return the SHA-256 that `code` names; None where there is no code, or it is a path still."""
    found = _STORED.fullmatch(code or "")
    return None if found is None else found[1]


def is_carried(python: str | None, path: str | None, modules: Collection[str]) -> bool:
    """Return whether a function is of a wheel with these modules and packages at its top."""
    return python is not None and path is None and re.split("[.:]", python)[0] in modules


class Placing(Protocol):
    """Function that gives a part of a job another place of its code."""

    def __call__(self, spec: S, /) -> S: ...


def unpacked_in(job: JobSpec, folder: str, modules: Collection[str]) -> JobSpec:
    """Return the job of a machine that has the wheel's `modules` in `folder`."""

    def unpacked(spec: S) -> S:
        if not is_carried(spec.python, spec.path, modules):
            return spec
        return dataclasses.replace(spec, path=folder)

    return dataclasses.replace(placed(job, unpacked), code=None)


def placed(job: JobSpec, place: Placing) -> JobSpec:
    """Return the job with its model, data and optimizer as `place` gives them."""
    model, evaluation, training = job.model, job.evaluation, job.training
    if evaluation is not None and evaluation.data is not None:
        evaluation = dataclasses.replace(evaluation, data=place(evaluation.data))
    return dataclasses.replace(
        job,
        model=place(model) if isinstance(model, OwnModelSpec) else model,
        data=place(job.data),
        evaluation=evaluation,
        training=dataclasses.replace(training, optimizer=place(training.optimizer)),
    )


def _check_end(content: bytes) -> None:
    """Bound the directory's size before it is read."""
    end = content[-_END.size :]
    large = content[-_END.size - _LARGE_END_BYTES :].startswith(_LARGE_END)
    if len(end) < _END.size or large or not end.startswith(b"PK\x05\x06"):
        raise ValueError(_NO_WHEEL)
    if _END.unpack(end)[1] > _MOST_DIRECTORY_BYTES:
        raise ValueError(f"it has far more than {_MOST_FILES} files; leave data out of the wheel")


@contextmanager
def _damage_refused() -> Iterator[None]:
    """Raise ValueError in place of the errors that reading a damaged zip file gives."""
    try:
        yield
    except (
        *(zipfile.BadZipFile, zlib.error, struct.error),
        *(EOFError, NotImplementedError, ValueError),
    ) as error:
        raise ValueError(f"it is damaged ({str(error)[:200]!a}); build it anew") from error


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
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        raise ValueError(f"{name} in it is a link or no regular file; put the file itself there")
    if parts[0].endswith(".data"):
        raise ValueError(
            f"{name} in it is for an installation, and a job's wheel is not installed; put it into "
            "a package"
        )
    if _NATIVE.search(name):
        raise ValueError(
            f"{name} in it is not Python, and only pure Python goes with a job; install the wheel "
            "on every node"
        )
    if info.flag_bits & 1 or info.compress_type not in _PACKED:
        raise ValueError(f"{name} in it has a compression that no wheel uses; build it anew")

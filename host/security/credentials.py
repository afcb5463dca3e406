"""Credentials by which a process proves its identity, in files: a folder per holder.

`client.crt` and `client.key` are the holder's, `ca.crt` is the cluster's authority. Only the owner
may read a key, else the folder is refused. `oobleck.host.security.credential_folder` decides which
holder may use a folder. Must not know certificates' contents, nor load the library for them.
"""

import contextlib
import errno
import os
import secrets
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oobleck.host.system.files import read_regular

#: Name in every master's certificate, and in no other.
MASTER_NAME = "master.oobleck"

Role = Literal["agent", "worker", "operator", "viewer"]
ROLES: tuple[Role, ...] = ("agent", "worker", "operator", "viewer")

AUTHORITY = "ca.crt"
CERTIFICATE = "client.crt"
KEY = "client.key"
#: Files beside the first one in the folder of the authority itself.
AUTHORITY_KEY = "ca.key"
MASTER_CERTIFICATE = "master.crt"
MASTER_KEY = "master.key"
#: Folder in there with the first operator's credentials.
OPERATOR = "operator"
#: Life of the master's own certificate, which the master renews itself.
MASTER_LIFE_S = 90 * 86_400.0
#: Variable of the environment that may hold a join token.
TOKEN_VARIABLE = "OOBLECK_JOIN_TOKEN"
_MOST_BYTES = 64 << 10
#: Bits of a file's mode for all but its owner.
_OTHERS = 0o077
#: Errors of file systems without hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Authority, certificate and private key, in PEM."""

    authority: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "Credentials(...)"  # keep the key out of logs


def read_credentials(folder: Path) -> Credentials:
    """Read the credentials in a folder. Raises ValueError with the file and the fix."""
    found = Credentials(
        authority=read_file(folder / AUTHORITY),
        certificate=read_file(folder / CERTIFICATE),
        key=read_secret(folder / KEY),
    )
    _check(folder)
    return found


def _check(folder: Path) -> None:
    """Raise ValueError if the files' content is not fit for TLS: gRPC would end the process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    fix = "get new ones into another folder with 'oobleck pki join' or 'oobleck pki issue'"
    try:
        context.load_verify_locations(folder / AUTHORITY)
    except OSError as error:
        raise ValueError(f"{folder / AUTHORITY}: is no certificate; {fix}") from error
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: {CERTIFICATE} and {KEY} are damaged, or not of each other; {fix}"
        ) from error


def read_file(path: Path) -> bytes:
    """Read a file; raises ValueError with the file and the fix."""
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        fix = "name a folder with credentials, as 'oobleck pki join' makes one"
        raise ValueError(f"{path}: {reason}; {fix}") from error


def read_secret(path: Path) -> bytes:
    """Read a file that only its owner may read. Raises ValueError with the file and the fix."""
    content = read_file(path)
    mode = path.stat().st_mode & 0o777
    if mode & _OTHERS:
        raise ValueError(f"{path}: others may read it (mode {mode:o}); run: chmod 600 {path}")
    return content


def make_private(folder: Path) -> None:
    """Make the folder and missing parents, for their owner alone. Raises OSError."""
    if not folder.parent.is_dir():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def write_private(path: Path, content: bytes) -> None:
    """Put the file in place at once, readable for its owner alone. Raises OSError."""
    with _finished(path, content) as finished:
        finished.replace(path)


def check_writable(path: Path) -> None:
    """Raise OSError if no file could be put in place."""
    with _finished(path, b""):
        pass


def create_private(path: Path, content: bytes) -> bool:
    """Create the file for its owner alone, unless it exists, and return whether it was created.
    Raises OSError. Without hard links it is written in place; readers refuse an unfinished one."""
    with _finished(path, content) as finished:
        try:
            os.link(finished, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_in_place(path, content)
    return True


def _create_in_place(path: Path, content: bytes) -> bool:
    try:
        _write(path, content)
    except FileExistsError:
        return False
    return True


@contextlib.contextmanager
def _finished(path: Path, content: bytes) -> Iterator[Path]:
    """Write the content to a temporary file beside `path`, on the disk, and yield its path."""
    # An unguessable name, so that no link can be waiting there.
    finished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write(finished, content)
        yield finished
    finally:
        with contextlib.suppress(OSError):
            finished.unlink()


def _write(path: Path, content: bytes) -> None:
    """Make the file, which must not exist. Raises OSError, also where others could read it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(PermissionError):  # FAT has one mode for all files
                os.fchmod(descriptor, 0o600)  # whatever the umask
            if os.fstat(descriptor).st_mode & _OTHERS:
                raise OSError(errno.EPERM, "its file system lets others read every file")
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is more useful
            path.unlink()
        raise

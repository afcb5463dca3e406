"""`oobleck backup`: a folder from which another head can take over."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from oobleck.cli.client import MasterClient
from oobleck.cli.options import master_option
from oobleck.core.codec import decode, encode
from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.ipc.endpoint import Endpoint, find_own_master
from oobleck.host.security.credentials import AUTHORITY_KEY, write_private
from oobleck.host.storage.backup import AUTHORITY, SUMMARY, StoredFile, Summary, check_path
from oobleck.host.system.files import sync_directory
from oobleck.proto import control_pb2 as pb


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--no-logs", is_flag=True, help="Leave out the workers' output.")
@click.option(
    "--authority",
    is_flag=True,
    help="Copy the cluster's authority and its key too; run it on the head's host, as the master's "
    "user. Protect such a backup like the key.",
)
@master_option
def backup(folder: Path, no_logs: bool, authority: bool, master: Endpoint) -> None:
    """Copy the head's state into DIR, while everything runs.

    DIR gets the journal, the files of all jobs, profiles and wheels, as of one moment. A new head
    takes over with: oobleck-master --state-dir NEW --restore DIR. DIR/backup.json is written last,
    so a copy without it is not a backup. DIR must be empty or not exist.
    """
    pki = _authority_of(master) if authority else None
    try:
        _make_empty(folder)
        with MasterClient(master) as connection:
            summary = _receive(folder, connection.backup(output=not no_logs))
        if pki is not None:
            summary = _with_authority(folder, pki, summary)
        write_private(folder / SUMMARY, encode(summary))
        sync_directory(folder)
    except OSError as error:
        reason = f"{error.strerror or error}; the folder is not a backup"
        raise CommandFailed(f"{folder}: {reason}", FAILED) from error
    size = sum(file.bytes for file in summary.files.values())
    click.echo(
        f"{folder}: {len(summary.files)} files, {size / 2**20:.1f} MiB, up to event "
        f"{summary.sequence}"
    )


def _authority_of(master: Endpoint) -> Path:
    """Return the folder of the authority of a master on this host. Raise CommandFailed."""
    own = next(filter(None, map(find_own_master, master.addresses)), None)
    if own is None or not (own.pki / AUTHORITY_KEY).is_file():
        raise CommandFailed(
            f"--authority: the master at {master} is not yours or not on this host; run this as "
            "its user on its host, or copy the authority's folder there by hand",
            USAGE,
        )
    return own.pki


def _make_empty(folder: Path) -> None:
    """Make an empty folder. Raise CommandFailed or OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        text = f"{folder}: is not empty; name an empty folder or a new one"
        raise CommandFailed(text, USAGE)


def _receive(folder: Path, parts: Iterable[pb.BackupPart]) -> Summary:
    """Write the files as they arrive. Raise CommandFailed or OSError."""
    files: dict[str, StoredFile] = {}
    coming: _Coming | None = None
    try:
        for part in parts:
            if part.summary:
                return msgspec.structs.replace(decode(Summary, part.summary), files=files)
            if part.path:
                coming = _Coming(folder, check_path(part.path))
            if coming is None:
                raise ValueError("the master sent data outside any file")
            coming.add(part.data)
            if part.sha256:
                files[coming.name] = coming.end(part.sha256)
                coming = None
    except ValueError as error:
        raise CommandFailed(f"{folder}: {error}; the folder is not a backup", FAILED) from error
    finally:
        if coming is not None:
            coming.close()
    raise CommandFailed(f"{folder}: the master ended before the backup did; run it again", FAILED)


class _Coming:
    """File that is being received."""

    def __init__(self, folder: Path, name: str) -> None:
        """Create the file. Raise OSError, also if it exists."""
        self.name = name
        self._hash, self._bytes = hashlib.sha256(), 0
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")

    def add(self, data: bytes) -> None:
        self._hash.update(data)
        self._bytes += len(data)
        self._file.write(data)

    def end(self, sha256: str) -> StoredFile:
        """Write the file to disk. Raise ValueError if it differs from what the master sent."""
        if (found := self._hash.hexdigest()) != sha256:
            raise ValueError(f"{self.name} was damaged in transfer")
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return StoredFile(bytes=self._bytes, sha256=found)

    def close(self) -> None:
        self._file.close()


def _with_authority(folder: Path, pki: Path, summary: Summary) -> Summary:
    """Copy the authority's folder too. Raise OSError."""
    files = dict(summary.files)
    for path in sorted(pki.rglob("[!.]*")):  # those with a dot are unfinished
        if path.is_file():
            name = check_path(f"{AUTHORITY}/{path.relative_to(pki).as_posix()}")
            content = path.read_bytes()
            coming = _Coming(folder, name)
            coming.add(content)
            files[name] = coming.end(hashlib.sha256(content).hexdigest())
    return msgspec.structs.replace(summary, files=files)

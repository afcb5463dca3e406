"""Puts a backup into an empty state directory.

All of the backup is checked before anything is written. While files are copied, the directory has
the file `restoring`, and no master starts on it. The next `--restore` begins anew. Must not know
the journal's events, nor what a restored master does differently.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from oobleck.host.storage.backup import (
    AUTHORITY,
    FOLDERS,
    JOURNAL,
    SUMMARY,
    InvalidBackup,
    Summary,
    read_file,
    read_summary,
)
from oobleck.host.system.files import sync_directory
from oobleck.master.config import Unusable
from oobleck.master.storage.disk import storing

_UNDER_WAY = "restoring"
#: Entries of a directory that counts as empty: the master's lock, the authority that somebody has
#: put there, and what a new file system has.
_ALLOWED = frozenset({"lock", AUTHORITY, "lost+found"})


def check_target(state_dir: Path, backup: Path) -> None:
    """Raises Unusable unless the backup may be restored into the directory."""
    if backup.resolve() in state_dir.resolve().parents:
        raise Unusable(
            f"--state-dir {state_dir} is inside the backup {backup}; choose one outside of it"
        )
    try:
        found = {path.name for path in state_dir.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"--state-dir {state_dir} cannot be read ({error.strerror}); choose another one"
        raise Unusable(text) from error
    if _UNDER_WAY in found:
        return
    if more := sorted(found - _ALLOWED):
        raise Unusable(
            f"--state-dir {state_dir} is not empty (it has {more[0]}); restore into another one, "
            "or leave --restore out to go on from what is there"
        )


def check_started(state_dir: Path) -> None:
    """Raises Unusable where a restore was cut off, or the directory is a backup."""
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
    """Return whether the authority in the state directory is to be the backup's: it has one, and
    the directory has none but what a restore that was cut off has left."""
    marker = state_dir / _UNDER_WAY
    left = marker.is_file() and marker.read_text() == AUTHORITY
    return summary.has_authority and (left or not (state_dir / AUTHORITY).exists())


def check_cluster(summary: Summary, cluster: str) -> None:
    """Raises Unusable unless the backup is of this cluster. `cluster`: of the authority at hand;
    empty: there is none."""
    if summary.cluster and summary.cluster != cluster:
        missing = "there is no authority here" if not cluster else "the authority here is another"
        raise Unusable(
            f"--restore: the backup is of the cluster {summary.cluster[:16]}, and {missing}; copy "
            "the folder of that cluster's authority here, and name it with --pki"
        )


def restore(backup: Path, summary: Summary, state_dir: Path, *, authority: bool) -> None:
    """Copy a checked backup into a checked directory; the caller holds its lock. `authority`:
    including the authority that it has. Raises Unusable, StorageFailed."""
    marker = state_dir / _UNDER_WAY
    with storing(state_dir):
        if marker.exists():
            _clear(state_dir, authority=marker.read_text() == AUTHORITY)
        marker.write_text(AUTHORITY if authority else "")
        sync_directory(state_dir)
    folders = {state_dir}
    # The journal is the last.
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
    """Raises OSError, Unusable."""
    try:
        with open(target, "xb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
    except InvalidBackup as invalid:
        raise Unusable(f"--restore {invalid}; it has just been changed") from invalid


def _clear(state_dir: Path, *, authority: bool) -> None:
    """Remove the part of a backup that is there. Raises OSError."""
    for name in FOLDERS:
        if name != AUTHORITY or authority:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(state_dir / name)
    (state_dir / JOURNAL).unlink(missing_ok=True)

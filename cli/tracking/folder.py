"""Folder of one job's copies, each of which one process writes at a time."""

import contextlib
import fcntl
from pathlib import Path
from typing import BinaryIO

from oobleck.cli.options import FAILED
from oobleck.host.command import CommandFailed

#: File in the folder with the job's time of submission, Unix time.
_OWNER = "submitted_at"


def claim(folder: Path, submitted_at: float) -> None:
    """Mark the folder as that of the job submitted at this time.

    Two clusters may each have a job of one id; the copy of one must not continue the other's. Raise
    CommandFailed or OSError.
    """
    path, own = folder / _OWNER, repr(submitted_at)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(own)
    if path.read_text() != own:
        text = f"{folder} belongs to another cluster's job with that id; name another --directory"
        raise CommandFailed(text, FAILED)


def open_locked(path: Path) -> BinaryIO:
    """Open a file to read and append, locked against other processes. Make its folder.

    Raise CommandFailed or OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115  # for as long as it is locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        text = f"{path} is being written by another process; end that, or name another --directory"
        raise CommandFailed(text, FAILED) from error
    return file

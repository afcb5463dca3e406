"""The folder of one job's copies, each of which one process writes at a time."""

import contextlib
import fcntl
from pathlib import Path
from typing import BinaryIO

from oobleck.cli.options import FAILED
from oobleck.host.command import CommandFailed

#: In the folder: when its job was submitted, Unix time.
_OWNER = "submitted_at"


def claim(folder: Path, submitted_at: float) -> None:
    """Make the folder the job's that was submitted then. Two clusters may each have a job of one
    id: the copy of the one must not go on where that of the other has ended. Raises CommandFailed,
    OSError."""
    path, own = folder / _OWNER, repr(submitted_at)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(own)
    if path.read_text() != own:
        text = f"{folder} is of another cluster's job of that id; name another --directory"
        raise CommandFailed(text, FAILED)


def open_locked(path: Path) -> BinaryIO:
    """Open a file to read and append to, by nobody else until it is closed. Makes the folder.
    Raises CommandFailed, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115  # for as long as it is locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        text = f"{path} is written by another process; end that, or name another --directory"
        raise CommandFailed(text, FAILED) from error
    return file

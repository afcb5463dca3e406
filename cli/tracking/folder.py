"""The folder of one job's copy, which one process writes at a time."""

import fcntl
from pathlib import Path
from typing import BinaryIO

from oobleck.cli.options import FAILED
from oobleck.host.command import CommandFailed


def open_locked(path: Path) -> BinaryIO:
    """To be read and appended to, by nobody else until it is closed. Makes the folder. Raises
    CommandFailed, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115  # for as long as it is locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        text = f"{path} is written by another process; end that, or name another --directory"
        raise CommandFailed(text, FAILED) from error
    return file

"""Text files that the user names: read whole, within limits of size and time.

Owns what may be read (a regular file, a pipe, standard input) and how much. Must not know the
contents.
"""

import os
import select
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from oobleck.cli import options
from oobleck.host.command import CommandFailed
from oobleck.host.system.files import open_at_once

#: Longest silence of a pipe's writer; a pipe without one would block for ever.
PIPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """Text file that a command reads."""

    #: Description for messages, after "give".
    what: str
    most_mib: int
    #: Prefix of messages, before the path.
    field: str = ""


#: A job file has a few hundred bytes, the profile of the largest model a megabyte.
JOB_FILE = TextFile(what="a YAML job file", most_mib=1)
PROFILE_FILE = TextFile(
    what="a profile file, as 'oobleck profile JOB.yaml --output P.json' writes it",
    most_mib=16,
    field="--profile ",
)
PROFILE_OF_JOB = TextFile(
    what="measure, estimate or the path of a profile file", most_mib=16, field="profile: "
)

CONFIG_OF_MODEL = TextFile(
    what="the config.json of a Hugging Face model", most_mib=1, field="model: "
)


def read_text(path: Path, wanted: TextFile) -> str:
    """Return the text of a regular file, a pipe, or standard input for `-`. Raise CommandFailed."""
    most = wanted.most_mib << 20
    try:
        if str(path) == "-":
            if sys.stdin is None:  # closed by the process that started this one
                raise _refused(path, wanted, "standard input is closed")
            raw = sys.stdin.buffer.read(most + 1)
        else:
            raw = _read_file(path, wanted, most)
    except OSError as error:
        raise _refused(path, wanted, str(error.strerror)) from error
    if len(raw) > most:
        raise _refused(path, wanted, f"larger than {wanted.most_mib} MiB")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _refused(path, wanted, "not a text file") from error


def _refused(path: Path, wanted: TextFile, problem: str) -> CommandFailed:
    text = f"{wanted.field}{path}: {problem}; give {wanted.what}"
    return CommandFailed(text, options.USAGE)


def _read_file(path: Path, wanted: TextFile, most: int) -> bytes:
    descriptor = open_at_once(path)
    with open(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return _read_all(file.read, most)
        if not stat.S_ISFIFO(mode):
            raise _refused(path, wanted, "is not a regular file")

        def read_pipe(count: int) -> bytes | None:
            if not select.select([descriptor], [], [], PIPE_TIMEOUT_S)[0]:
                silence = f"nothing came through this pipe for {PIPE_TIMEOUT_S:.0f} s"
                raise _refused(path, wanted, silence)
            return file.read(count)

        return _read_all(read_pipe, most)


def _read_all(read: Callable[[int], bytes | None], most: int) -> bytes:
    """Read to the end, or one byte beyond the limit."""
    raw = b""
    while len(raw) <= most and (piece := read(most + 1 - len(raw))):
        raw += piece
    return raw

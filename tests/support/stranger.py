"""What another user of this host gets of a cluster, told as JSON on standard output.

Run as root: stranger.py UID MASTER STATE_DIR JOB.yaml
"""

import contextlib
import io
import json
import os
import socket
import sys
from pathlib import Path

from oobleck.cli.main import oobleck
from oobleck.host import command


def try_commands(master: str, job: str) -> dict[str, tuple[int, str]]:
    """Exit code and error of each command."""
    lines = (("status",), ("submit", job), ("cancel", "some-1"), ("pki", "token"))
    return {line[0]: try_command(*line, "--master", master) for line in lines}


def try_command(*arguments: str) -> tuple[int, str]:
    with (
        contextlib.redirect_stderr(io.StringIO()) as errors,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = command.run(oobleck, "oobleck", arguments)
    return code, errors.getvalue()


def ask(owner: int, master: str) -> str:
    """What the owner's master says to whoever looks for it by its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(f"\0oobleck/{owner}/{master}")
        return asking.recv(4096).decode()


def readable(folder: str) -> list[str]:
    """Files and folders, this one included, that can be read or written."""
    found = [folder] if os.access(folder, os.R_OK) or os.access(folder, os.W_OK) else []
    # By name too: a folder that may not be listed may still be passed through.
    names = [folder, *(os.path.join(folder, name) for name in NAMES)]
    found += [name for name in names if os.path.isdir(name) and _lists(name)]
    return found + [name for name in names if os.path.isfile(name) and os.access(name, os.R_OK)]


def _lists(folder: str) -> bool:
    with contextlib.suppress(OSError):
        os.listdir(folder)
        return True
    return False


if __name__ == "__main__":
    user, master, folder, job = sys.argv[1:]
    owner = os.geteuid()
    NAMES = [str(path.relative_to(folder)) for path in Path(folder).rglob("*")]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ["HOME"] = "/nowhere"
    try_commands("127.0.0.1:1", job)  # which loads what that user may not be able to read
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    told = {
        "commands": try_commands(master, job),
        "asked": ask(owner, master),
        "readable": readable(folder),
    }
    sys.stdout.write(json.dumps(told))

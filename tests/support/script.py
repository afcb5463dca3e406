"""A script of a test, in a process that has the libraries of workers loaded: torch alone takes
three seconds of a core. Not for what is to show that something is loaded, or is not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from bench.support.preloaded import Preloaded
from support.waiting import PATIENCE_S


def run_script(preloaded: Preloaded, script: str, *arguments: str) -> tuple[str, str]:
    """Run it to its end; return what it has printed, and what it has written to standard error."""
    done = preloaded.run(__name__, script, *arguments, environment=os.environ, timeout_s=PATIENCE_S)
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, script, done.stdout, done.stderr)
    return done.stdout, done.stderr


@contextmanager
def talking_script(
    preloaded: Preloaded, script: str, *arguments: str
) -> Iterator[tuple[TextIO, TextIO]]:
    """Start it; yield its standard input and output. It is killed where it still runs after."""
    (theirs, write), (read, out) = os.pipe(), os.pipe()
    with open(write, "w") as to, open(read) as told:
        started = preloaded.start(
            *(__name__, script, *arguments),
            environment=os.environ,
            files=[theirs, out, 2],
            timeout_s=PATIENCE_S,
        )
        os.close(theirs)
        os.close(out)
        try:
            yield to, told
        finally:
            started.close()


def main() -> None:
    script = sys.argv.pop(1)
    exec(script, {"__name__": "__main__"})

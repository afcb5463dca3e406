"""Things of a run on this machine besides processes: folders, file systems, network namespaces.

Their names contain the process. A run that ends with an exception removes them, and SIGTERM and
SIGHUP (unless ignored, as under nohup) raise one. The remains of killed runs are removed by the
next run that makes such things.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from oobleck.host.system.process import end_signals

_NAME = re.compile(r"oobleck-run-(\d+)(-|$)")


def own_name() -> str:
    """Return the prefix of the names of all that this process makes. Nothing else may have it,
    since remains are removed unasked."""
    return f"oobleck-run-{os.getpid()}"


def is_over(name: str) -> bool:
    """Return whether a thing of that name is of a run that has ended."""
    match = _NAME.match(name)
    return match is not None and not psutil.pid_exists(int(match[1]))


class _Ends:
    """Handler of signals that end this process: they raise KeyboardInterrupt, or wait."""

    def __init__(self) -> None:
        self._waiting: list[int] | None = None

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers, and gets signals
            return
        ends = (signal.SIGTERM, *end_signals())
        before = {signum: signal.signal(signum, self._handle) for signum in ends}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        before, self._waiting = self._waiting, []
        try:
            yield
        finally:
            came, self._waiting = self._waiting, before
        if came:
            self._handle(came[0], None)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self._waiting is None:
            raise KeyboardInterrupt(signal.Signals(signum).name)
        self._waiting.append(signum)


_ends = _Ends()


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Yield a folder for this run. Within the context SIGTERM and SIGHUP raise
    KeyboardInterrupt."""
    sweep()
    with _ends.raised(), tempfile.TemporaryDirectory(prefix=f"{own_name()}-") as folder:
        yield Path(folder)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """Delay signals that end this process within the context, for the end of a run."""
    return _ends.held()


def sweep() -> None:
    """Remove the folders and file systems of runs that have ended."""
    for mounted in psutil.disk_partitions(all=True):
        if is_over(mounted.device):
            unmount(Path(mounted.mountpoint))
    for folder in Path(tempfile.gettempdir()).iterdir():
        if is_over(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def mount_memory(folder: Path, megabytes: int) -> None:
    """Make the folder, and mount a file system of that size there."""
    folder.mkdir(parents=True, exist_ok=True)
    disk = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", own_name(), str(folder)]
    subprocess.run(disk, check=True)


def unmount(folder: Path) -> None:
    """Unmount the folder, even if files are open there, or if it was not mounted."""
    subprocess.run(["umount", "--lazy", str(folder)], check=False, stderr=subprocess.DEVNULL)

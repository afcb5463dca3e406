"""The end of a process is known before its memory is freed, when its parent hears of it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from oobleck.agent.processes import children
from oobleck.agent.processes.children import EndWatch, ExitStatus
from support import loops
from support.waiting import PATIENCE_S

#: Has threads and so much memory that it takes the kernel some hundredths of a second to free.
LARGE = """
import sys, threading
memory = bytearray(400 << 20)
for start in range(0, len(memory), 4096):
    memory[start] = 1
for _ in range(4):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("there", flush=True)
sys.stdin.read()
raise SystemExit(3)
"""
SMALL = "import sys; print('there', flush=True); sys.stdin.read(); raise SystemExit({})"


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "there\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def has_ended(pid: int) -> bool:
    """As its parent is told."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def told(process: subprocess.Popen[str]) -> tuple[ExitStatus, bool]:
    """What a watch tells of a process that is killed now, and whether its parent knows already."""
    found: asyncio.Future[tuple[ExitStatus, bool]] = asyncio.get_running_loop().create_future()
    watch = EndWatch(process.pid, lambda how: found.set_result((how, has_ended(process.pid))))
    await asyncio.sleep(2 * children.LOOK_S)
    assert not found.done(), "it lives"
    process.kill()
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await found
    finally:
        watch.stop()


def test_it_is_told_before_the_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOOK_S", 0.002)
    for _ in range(5):  # on a busy machine this process may not run in between
        with running(LARGE) as process:
            how, too_late = loops.run(told(process))
        assert how == (None, signal.SIGKILL)
        if not too_late:
            return
    raise AssertionError("its parent always knew first")


@pytest.mark.parametrize(("code", "how"), [(3, (3, None)), (0, None)])
def test_how_one_ends_by_itself(code: int, how: ExitStatus | None) -> None:
    """What ends well is left to its parent: so looks one whose first thread alone has ended."""

    async def run() -> list[ExitStatus]:
        found: list[ExitStatus] = []
        with running(SMALL.format(code)) as process:
            watch = EndWatch(process.pid, found.append)
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
            await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            await asyncio.sleep(3 * children.LOOK_S)
            watch.stop()
        return found

    assert loops.run(run()) == ([] if how is None else [how])


def test_of_one_that_is_gone_or_is_not_watched_any_more_nothing_is_told() -> None:
    async def run() -> list[ExitStatus]:
        found: list[ExitStatus] = []
        with running(SMALL.format(0)) as process:
            stopped = EndWatch(process.pid, found.append)
            reaped = EndWatch(process.pid, found.append)
            stopped.stop()
            process.kill()
            process.wait()
            late = EndWatch(process.pid, found.append)
            await asyncio.sleep(3 * children.LOOK_S)
            for watch in (stopped, reaped, late):
                watch.stop()
        return found

    assert loops.run(run()) == []

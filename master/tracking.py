"""Copies of jobs for other programs, as their key `track` asks: a process writes each of them.

It is `oobleck track`, which follows the job as it does on any machine, shows a viewer's certificate
where callers must show one, and ends with the master, however that ends. Its files tell it how far
it was, so the next one goes on behind that. A file `PROGRAM.done` beside them says that a copy of a
job that has ended is whole. Nothing of training waits for any of this, and no failure of it is the
job's. Must not know what the programs are.
"""

import asyncio
import importlib.util
import logging
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from oobleck.core.ids import JobId
from oobleck.core.job.spec import JobSpec, Tracker
from oobleck.host.system.process import with_parent
from oobleck.master.loop import Master
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED

log = logging.getLogger(__name__)

#: Copies that are written at a time: no job has more programs than that.
_MOST = 3
#: Between two looks at what is wanted.
_LOOK_S = 0.5
#: A process that fails is followed by another one after so long, each time twice as long.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: One that has lived for so long had not failed at its start.
_QUICK_S = 10.0
#: Of a job that has ended, a copy that fails so often in a row is left as it is.
_MOST_FAILURES = 5
_TAIL_BYTES = 2048

Copy = tuple[JobId, Tracker]


def wanted(state: ClusterState, finished: Collection[Copy]) -> list[Copy]:
    """The copies to write now: first of the job that has the turn, then of those that have ended,
    the newest first. Pure."""
    active = [job for job in state.jobs.values() if job.id == state.active]
    ended = [job for job in reversed(state.jobs.values()) if job.state in ENDED]
    copies: list[Copy] = [(job.id, name) for job in [*active, *ended] for name in job.spec.track]
    return [copy for copy in copies if copy not in finished][:_MOST]


def check_installed(job: JobSpec) -> None:
    """Raises ValueError where a program that the job names is missing here. Loads none."""
    for name in job.track:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is none
            raise ValueError(
                f"track: {name} is not installed where the master runs; run there: pip install "
                f"{name}, or leave {name} out"
            )


class Tracking:
    def __init__(self, master: Master, show: Callable[[], tuple[str, ...]]) -> None:
        """`show`: has credentials ready for a process; returns the flags that name them."""
        self._master = master
        self._show = show
        #: Copies that are whole, or were given up.
        self._finished = {
            (job.id, name)
            for job in master.state.jobs.values()
            for name in job.spec.track
            if self._mark(job.id, name).exists()
        }

    async def run(self, address: str) -> None:
        """`address`: of the master. Never returns; ends by cancellation, and the processes with
        it."""
        writers: dict[Copy, asyncio.Task[None]] = {}
        try:
            while True:
                changed = self._master.changes.next
                now = wanted(self._master.state, self._finished)
                for copy in [copy for copy in writers if copy not in now or writers[copy].done()]:
                    await _end(writers.pop(copy))
                for copy in now:
                    if copy not in writers:
                        writers[copy] = asyncio.create_task(self._write(copy, address))
                if not any(writer.done() for writer in writers.values()):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(10 * _LOOK_S):
                            await changed.wait()
                await asyncio.sleep(_LOOK_S)
        finally:
            for writer in writers.values():
                await _end(writer)

    async def _write(self, copy: Copy, address: str) -> None:
        """Copy the job, restarting failed attempts, until the copy is whole or given up."""
        job_id, name = copy
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                code = await self._process(copy, address)
                if code == 0 and self._has_ended(job_id):
                    self._mark(job_id, name).touch()
                    break
                said = await asyncio.to_thread(last_line, self._log(copy))
                reason = said or f"ended with exit code {code}"
            except Exception as error:  # noqa: BLE001  # a copy must not end the master
                reason = f"{type(error).__name__}: {error}"
            failures = failures + 1 if loop.time() - began < _QUICK_S else 1
            fields = {"job": job_id, "program": name, "reason": reason}
            if failures >= _MOST_FAILURES and self._has_ended(job_id):
                log.error("a copy of a job is left as it is", extra=fields)
                break
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(10, failures - 1))
            log.warning("who copies a job is started anew", extra={**fields, "after_s": pause_s})
            await asyncio.sleep(pause_s)
        self._finished.add(copy)

    async def _process(self, copy: Copy, address: str) -> int:
        """Run one copying process to its end and return its exit code. Raises OSError."""
        job_id, name = copy
        folder = self._master.config.tracking
        arguments = [job_id, "--to", name, "--directory", str(folder), "--master", address]
        said = self._log(copy)
        said.parent.mkdir(parents=True, exist_ok=True)
        with said.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *with_parent("oobleck.cli.main"),
                "track",
                *arguments,
                *await asyncio.to_thread(self._show),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _has_ended(self, job_id: JobId) -> bool:
        job = self._master.state.jobs.get(job_id)
        return job is None or job.state in ENDED

    def _mark(self, job_id: JobId, name: str) -> Path:
        return self._master.config.tracking / job_id / f"{name}.done"

    def _log(self, copy: Copy) -> Path:
        job_id, name = copy
        return self._master.config.tracking / job_id / f"{name}.log"


def last_line(path: Path) -> str:
    """Return the last line of a file, reading only its end; empty: it has no lines. Raises
    OSError."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return lines[-1] if lines else ""


async def _end(task: asyncio.Task[None]) -> None:
    """Raises what the task has raised."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()

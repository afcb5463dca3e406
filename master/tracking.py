"""Copies of jobs for other programs, by the job's key `track`; one process writes each copy.

The process is `oobleck track`, which follows the job as a remote client would, and ends with the
master. Where callers need certificates it has a viewer's. Its files record its progress, from which
the next process continues. A file `PROGRAM.done` beside them marks the complete copy of an ended
job. No copy delays training or fails the job. Must not know what the programs are.
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

#: Most copies written at a time; no job has more programs.
_MOST = 3
#: Shortest interval between checks of the wanted copies.
_LOOK_S = 0.5
#: Pause before a failed process is restarted, doubled each time.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
#: Seconds after which a process did not fail at its start.
_QUICK_S = 10.0
#: Consecutive failures after which the copy of an ended job is given up.
_MOST_FAILURES = 5
_TAIL_BYTES = 2048

Copy = tuple[JobId, Tracker]


def wanted(state: ClusterState, finished: Collection[Copy]) -> list[Copy]:
    """Return the copies to write now: of the active job, then of ended ones, newest first."""
    active = [job for job in state.jobs.values() if job.id == state.active]
    ended = [job for job in reversed(state.jobs.values()) if job.state in ENDED]
    copies: list[Copy] = [(job.id, name) for job in [*active, *ended] for name in job.spec.track]
    return [copy for copy in copies if copy not in finished][:_MOST]


def check_installed(job: JobSpec) -> None:
    """Raise ValueError unless the programs that the job names are installed here."""
    for name in job.track:
        module = importlib.util.find_spec(name)
        if module is None or module.origin is None:  # a mere folder of that name is no package
            raise ValueError(
                f"track: {name} is not installed where the master runs; run there: pip install "
                f"'oobleck-cluster[{name}]', or leave {name} out"
            )


class Tracking:
    def __init__(self, master: Master, show: Callable[[], tuple[str, ...]]) -> None:
        """Write copies. `show`: makes credentials for a process, and returns the flags for them."""
        self._master = master
        self._show = show
        #: Copies that are complete, or were given up.
        self._finished = {
            (job.id, name)
            for job in master.state.jobs.values()
            for name in job.spec.track
            if self._mark(job.id, name).exists()
        }

    async def run(self, address: str) -> None:
        """Write copies until cancelled; the processes end with it. `address`: the master's."""
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
        """Copy the job, restarting failed attempts, until the copy is complete or given up."""
        job_id, name = copy
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                code = await self._process(copy, address)
                if code == 0 and self._has_ended(job_id):
                    self._mark(job_id, name).touch()
                    break
                last = await asyncio.to_thread(last_line, self._log(copy))
                reason = last or f"ended with exit code {code}"
            except Exception as error:  # noqa: BLE001  # a copy must not end the master
                reason = f"{type(error).__name__}: {error}"
            failures = failures + 1 if loop.time() - began < _QUICK_S else 1
            fields = {"job": job_id, "program": name, "reason": reason}
            if failures >= _MOST_FAILURES and self._has_ended(job_id):
                log.error("a copy of a job is given up", extra=fields)
                break
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(10, failures - 1))
            log.warning(
                "the process that copies a job is restarted", extra={**fields, "after_s": pause_s}
            )
            await asyncio.sleep(pause_s)
        self._finished.add(copy)

    async def _process(self, copy: Copy, address: str) -> int:
        """Run one copying process to its end and return its exit code. Raises OSError."""
        job_id, name = copy
        folder = self._master.config.tracking
        arguments = [job_id, "--to", name, "--directory", str(folder), "--master", address]
        log_path = self._log(copy)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as output:
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
    """Return the last line of a file, from its end; empty: none. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return lines[-1] if lines else ""


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel the task, and raise its error, if it has failed."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()

"""Transfers of files by calls: backups to operators, and the wheels of jobs to the nodes.

Parts of a backup have at most 1 MiB. A wheel is on disk before its job is taken, and is deleted
when no job that goes on names it. A caller that asks for a wheel knows its hash, which the master
gives to the nodes of its job alone. Must not know what is in a wheel.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator
from contextlib import closing, suppress
from typing import Any

import grpc

from oobleck.core.codec import encode
from oobleck.core.job.spec import JobSpec
from oobleck.core.job.wheel import digest_of, stored_as
from oobleck.host.storage.backup import Summary
from oobleck.host.versions import installed
from oobleck.master.loop import Master
from oobleck.master.state.job import ENDED
from oobleck.master.storage.backup import Capture, Part
from oobleck.master.storage.code import CodeFolder
from oobleck.proto import control_pb2 as pb

CHUNK_BYTES = 1 << 20
#: Between two looks at what is still named.
_LOOK_S = 60.0


async def backup(master: Master, *, output: bool) -> AsyncGenerator[pb.BackupPart, None]:
    """Yield the files of one point, then its summary.

    Raises StorageFailed, OSError. Files are read in threads, while the master goes on.
    """
    with closing(Capture(master.config.state_dir, output=output)) as capture:
        await asyncio.to_thread(capture.look)
        while not capture.fix():
            await asyncio.to_thread(capture.look)
        summary = Summary(
            release=installed().oobleck,
            cluster=master.config.cluster,
            sequence=master.committed(),
            time=master.unix(),
            output=output,
        )
        parts = capture.parts()
        while (part := await asyncio.to_thread(_next, parts)) is not None:
            yield pb.BackupPart(path=part.path, data=part.data, sha256=part.sha256)
        yield pb.BackupPart(summary=encode(summary))


def _next(parts: Iterator[Part]) -> Part | None:
    return next(parts, None)


class CodeOfJobs:
    """The wheels in the master's state directory, for the calls that need them."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._folder = CodeFolder(master.config.code)

    async def put(self, chunks: AsyncIterator[bytes], wanted: Collection[str] | None = None) -> str:
        """Store a wheel, and return its hash once it is on disk. `wanted`: the hashes that one may
        have; None: any. Raises ValueError, StorageFailed."""
        with self._folder.receive() as wheel:
            async for chunk in chunks:
                await asyncio.to_thread(wheel.add, chunk)
            if wanted is not None and wheel.digest not in wanted:
                raise ValueError("code: the master has not asked for this wheel")
            return await asyncio.to_thread(wheel.keep)

    def has(self, digest: str) -> bool:
        """Return whether the wheel with that hash is on disk; it stays there for a while."""
        return self._folder.has(digest)

    def check(self, job: JobSpec) -> None:
        """Raises ValueError where the code of a new job has not come."""
        if job.code is None:
            return
        digest = digest_of(job.code)
        if digest is None or not self._folder.has(digest):
            raise ValueError("code: the wheel did not come; submit the job with 'oobleck submit'")

    async def chunks(self, digest: str, context: Any) -> AsyncIterator[bytes]:
        """The wheel with that hash, in parts; ends the call where there is none."""
        known = digest_of(stored_as(digest))
        file = None if known is None else await asyncio.to_thread(self._folder.open, known)
        if file is None:
            text = "code: the master has no such wheel (any more); submit the job again"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
            return
        with file:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield data

    async def run(self) -> None:
        """Remove what no job names any more. Never returns; ends by cancellation."""
        while True:
            jobs = self._master.state.jobs.values()
            codes = [digest_of(job.spec.code) for job in jobs if job.state not in ENDED]
            named = {code for code in codes if code is not None}
            with suppress(OSError):  # what cannot be removed now is looked at again
                await asyncio.to_thread(self._folder.remove_all_but, named, time.time())
            await asyncio.sleep(_LOOK_S)

"""Wheels of jobs on the master's disk, each by its hash: stored from submitters, sent to nodes.

A wheel is complete on disk before its job is accepted, and is removed once no unfinished job names
it. Nodes request it by its hash, which the master sends to the nodes of its job alone. Must not
know a wheel's content; nodes check that.
"""

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from oobleck.core.job.spec import JobSpec
from oobleck.host.system.files import open_regular, sync_directory
from oobleck.host.wheel import MOST_WHEEL_BYTES, digest_of, stored_as
from oobleck.master.state.job import ENDED, Job
from oobleck.master.storage.disk import storing
from oobleck.proto.bounds import PART_BYTES

#: Bytes of all wheels together.
_MOST_BYTES = 1 << 30
#: Seconds that a wheel is kept without a job: it is sent before its job.
_UNNAMED_S = 600.0
#: Seconds between two removals of unused wheels.
_LOOK_S = 60.0


class Wheels:
    """The wheels in a folder of the state directory, for the calls that need them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, digest: str) -> bool:
        """Return whether the wheel is stored. If so, keep it for a while longer: a job that names
        it is about to be submitted."""
        try:
            os.utime(self._folder / f"{digest}.whl")
        except FileNotFoundError:
            return False
        return True

    def check(self, job: JobSpec) -> None:
        """Raise ValueError where the wheel of a new job was not sent."""
        digest = digest_of(job.code)
        if job.code is not None and (digest is None or not self.has(digest)):
            raise ValueError("code: the wheel did not come; submit the job with 'oobleck submit'")

    async def put(self, parts: AsyncIterator[bytes], wanted: Collection[str] | None = None) -> str:
        """Store a wheel, and return its hash once it survives a power failure. Nothing stays of a
        wheel that is refused or breaks off. `wanted`: the hashes that it may have; None: any.
        Raises ValueError, StorageFailed."""
        temporary = self._folder / f"coming-{secrets.token_hex(8)}"
        file = await asyncio.to_thread(self._begin, temporary)
        whole = hashlib.sha256()
        try:
            async for part in parts:
                await asyncio.to_thread(self._add, file, part)
                whole.update(part)
            digest = whole.hexdigest()
            if wanted is not None and digest not in wanted:
                raise ValueError("code: the master has not asked for this wheel")
            await asyncio.to_thread(self._keep, file, temporary, digest)
        finally:
            with storing(self._folder):
                temporary.unlink(missing_ok=True)
                file.close()
        return digest

    def _begin(self, temporary: Path) -> BinaryIO:
        with storing(self._folder):
            self._folder.mkdir(exist_ok=True)
            used = sum(map(_size, self._folder.iterdir()))
        if used > _MOST_BYTES:
            raise ValueError(
                f"code: the wheels of jobs have {used >> 20} MiB on the master's disk, more than "
                f"{_MOST_BYTES >> 20}; submit the job when others have ended, or cancel some"
            )
        with storing(self._folder):
            return open(temporary, "xb")

    def _add(self, file: BinaryIO, part: bytes) -> None:
        if file.tell() + len(part) > MOST_WHEEL_BYTES:
            raise ValueError(
                f"code: the wheel has more than {MOST_WHEEL_BYTES} bytes; leave data out of it"
            )
        with storing(self._folder):
            file.write(part)

    def _keep(self, file: BinaryIO, temporary: Path, digest: str) -> None:
        with storing(self._folder):
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, self._folder / f"{digest}.whl")
            sync_directory(self._folder)
            sync_directory(self._folder.parent)

    async def parts(self, digest: str, context: Any) -> AsyncIterator[bytes]:
        """Yield the wheel with that hash in parts. End the call where there is none."""
        file = None
        if digest_of(stored_as(digest)) is not None:
            with suppress(FileNotFoundError):
                file = await asyncio.to_thread(open_regular, self._folder / f"{digest}.whl")
        if file is None:
            text = "code: the master has no such wheel (any more); submit the job again"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
            return
        with file:
            while data := await asyncio.to_thread(file.read, PART_BYTES):
                yield data

    async def run(self, jobs: Callable[[], Iterable[Job]]) -> None:
        """Remove the wheels that no job names any more, until this is cancelled."""
        while True:
            codes = [digest_of(job.spec.code) for job in jobs() if job.state not in ENDED]
            with suppress(OSError):  # tried again in the next round
                await asyncio.to_thread(self.remove_all_but, frozenset(codes), time.time())
            await asyncio.sleep(_LOOK_S)

    def remove_all_but(self, named: Collection[str | None], now: float) -> None:
        """Remove old wheels, except those in `named`: the hashes of unfinished jobs' wheels. `now`:
        by the clock of files."""
        if not self._folder.exists():
            return
        for file in self._folder.iterdir():
            if file.stem not in named and now - file.stat().st_mtime > _UNNAMED_S:
                file.unlink(missing_ok=True)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # renamed to its hash, or removed, meanwhile
        return 0

"""Backups of the state directory, as calls carry them to operators.

Parts of a file have at most 1 MiB.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing

from oobleck.core.codec import encode
from oobleck.host.storage.backup import Summary
from oobleck.host.versions import installed
from oobleck.master.loop import Master
from oobleck.master.storage.backup import Capture, Part
from oobleck.proto import control_pb2 as pb


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

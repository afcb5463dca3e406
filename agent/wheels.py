"""Wheels that jobs bring, unpacked in a folder of this node and never installed.

They are fetched from the master by their hash, and given back to a master that has lost them. A
wheel is used only if its hash is the job's. A folder appears when it is whole, and is for this user
alone.
"""

import asyncio
import logging
import os
import random
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc
import msgspec

from oobleck.core.messages import Launch
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.system.files import below_home
from oobleck.host.wheel import (
    MOST_WHEEL_BYTES,
    Wheel,
    digest_of,
    stored_as,
    unpacked_in,
)
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import PART_BYTES
from oobleck.proto.control_pb2_grpc import ControlStub
from oobleck.proto.secure import open_aio_channel

logger = logging.getLogger(__name__)

#: Below the home of the user whom the workers run as.
_FOLDER = "~/.cache/oobleck/code"
#: Number of wheels that stay, the newest used. Agents of one host may share them, and each has one
#: job.
_MOST_KEPT = 16
#: Name of the wheel itself in the folder that it is unpacked in: no module has such a name.
_WHEEL = ".whl"
_NOT_ACCEPTED = (
    "code: this node takes no code that comes with a job; start its agent with --accept-code, or "
    "install the code there and leave the key out"
)
#: Time for the largest wheel over a slow line, after which another call is made.
_CALL_TIMEOUT_S = 120.0
#: Longest wait before another try; the wait is a random part of it.
_RETRY_S = 2.0
#: Answers that another try does not change.
_FINAL = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


class NoCode(Exception):
    """Error: the job's code is not available here; the text is one line with the fix."""


class WheelCache:
    """Cache of wheels that are unpacked on this node."""

    def __init__(self, master: Callable[[], Endpoint] | None, folder: Path | None = None) -> None:
        """Use `folder`, or one below the home. `master`: returns the endpoint to fetch wheels from,
        with the newest certificate; None: this node takes no wheels."""
        self._master = master
        self._folder = folder
        #: Held while fetching: all workers of a node want the same wheel at the same time.
        self._lock = asyncio.Lock()

    async def complete(self, launch: Launch) -> Launch:
        """Return the launch with the folder of the job's unpacked code, or why there is none."""
        digest = digest_of(launch.job.code)
        try:
            if self._master is None or digest is None:
                raise NoCode(_NOT_ACCEPTED)
            async with self._lock:
                folder = await self._unpacked(digest)
            modules = {name.removesuffix(".py") for name in os.listdir(folder) if name != _WHEEL}
        except NoCode as error:
            return msgspec.structs.replace(launch, no_code=str(error))
        except OSError as error:
            reason = f"code: {error.filename}: {error.strerror}; correct that on this node"
            return msgspec.structs.replace(launch, no_code=reason)
        return msgspec.structs.replace(
            launch,
            job=unpacked_in(launch.job, str(folder), modules),
            allow_code=(*launch.allow_code, str(folder)),
        )

    async def give_back(self, digest: str) -> None:
        """Give a job's wheel to the master, which has asked for it, or log why not."""
        try:
            await self._give(digest)
        except NoCode as error:
            logger.warning("the job's code is not given back", extra={"reason": error})

    async def _give(self, digest: str) -> None:
        if self._master is None:
            raise NoCode(_NOT_ACCEPTED)
        if digest_of(stored_as(digest)) is None:
            raise NoCode("code: that is no hash of a wheel")
        try:
            content = await asyncio.to_thread((self._cache() / digest / _WHEEL).read_bytes)
        except OSError as error:
            raise NoCode(f"code: {error.filename}: {error.strerror}") from error
        places = range(0, len(content), PART_BYTES)
        parts = (pb.CodeChunk(data=content[at : at + PART_BYTES]) for at in places)
        async with open_aio_channel(self._master(), ()) as channel:
            stub = ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
            try:
                await stub.GiveCode(parts, timeout=_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise NoCode(f"code: {error.details() or error.code().name}") from error

    async def fetch(self, digest: str) -> bytes:
        """Fetch the wheel with that hash, retrying until the master answers. Raises NoCode."""
        assert self._master is not None, "this node takes wheels"
        logged = ""
        while True:
            try:
                return await _fetch_once(self._master(), digest)
            except grpc.aio.AioRpcError as error:
                if error.code() in _FINAL:
                    raise NoCode(error.details() or error.code().name) from error
                if (reason := error.code().name) != logged:
                    logged = reason
                    logger.warning("no code for the job yet, trying on", extra={"reason": reason})
            await asyncio.sleep(random.uniform(0.0, _RETRY_S))

    async def _unpacked(self, digest: str) -> Path:
        """Return the folder of the unpacked code, fetching it if needed. Raises NoCode, OSError."""
        cache = self._cache()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(cache)
        place = cache / digest
        if place.is_dir():
            os.utime(place)
        else:
            await asyncio.to_thread(_unpack, await self.fetch(digest), place)
        return place

    def _cache(self) -> Path:
        """Return the folder of all wheels. Raises NoCode if this user has no home."""
        try:
            return self._folder or below_home(_FOLDER)
        except ValueError as error:
            raise NoCode(f"code: {error}") from error


async def _fetch_once(endpoint: Endpoint, digest: str) -> bytes:
    content = bytearray()
    async with open_aio_channel(endpoint, ()) as channel:
        stub = ControlStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.GetCode(pb.CodeRequest(sha256=digest), timeout=_CALL_TIMEOUT_S)
        async for chunk in call:
            content += chunk.data
            if len(content) > MOST_WHEEL_BYTES:
                raise NoCode(f"code: the master sends more than {MOST_WHEEL_BYTES} bytes")
    return bytes(content)


def _unpack(content: bytes, place: Path) -> None:
    """Unpack a wheel into `place`, which is named by its hash. Raises NoCode, OSError."""
    try:
        wheel = Wheel(content)
        if wheel.digest != place.name:
            raise NoCode("code: what the master sent is not the job's wheel; submit it again")
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
            whole = Path(temporary) / place.name
            wheel.unpack(whole)
            (whole / _WHEEL).write_bytes(content)
            if not place.is_dir():  # another agent of this user may have been faster
                os.rename(whole, place)
    except ValueError as error:
        raise NoCode(f"code: {error}") from error
    by_use = sorted(place.parent.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)
    for old in by_use[_MOST_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def _check_own(folder: Path) -> None:
    """Raise NoCode if others could put code there."""
    found = folder.lstat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
        raise NoCode(
            f"code: {folder} is not a folder that only the agent's user can write to; remove it on "
            "this node"
        )

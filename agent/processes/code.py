"""Code that comes with jobs: wheels of pure Python, unpacked in a folder of this node by their
hash, never installed.

A wheel from the master is used only if its hash is the job's. A folder appears when it is whole,
and is for this user alone. Must not know where wheels are from.
"""

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from oobleck.core.job.wheel import digest_of, stored_as, unpacked_in
from oobleck.core.messages import Launch
from oobleck.host.system.home import below_home
from oobleck.host.wheel import Wheel

#: Below the home of the user whom the workers run as.
FOLDER = "~/.cache/oobleck/code"
#: Wheels that stay, the newest used. Agents of one host may share them, and each has one job.
_MOST_KEPT = 16
_NOT_ACCEPTED = (
    "code: this node takes no code that comes with a job; start its agent with --accept-code, or "
    "install the code there and leave the key out"
)


class NoCode(Exception):
    """Error: the job's code is not available here; the text is one line with the fix."""


#: The wheel with that hash, however long it takes; raises NoCode.
Fetch = Callable[[str], Awaitable[bytes]]
#: Gives a wheel back to the master; raises NoCode.
Give = Callable[[bytes], Awaitable[None]]
#: The wheel itself, in the folder that it is unpacked in: no module has such a name.
_WHEEL = ".whl"


class CodeCache:
    def __init__(self, fetch: Fetch | None, folder: Path | None = None) -> None:
        """`fetch`: None: this node accepts none. `folder`: None: `FOLDER`."""
        self._fetch = fetch
        self._folder = folder
        #: All workers of a node want the same one at the same time.
        self._alone = asyncio.Lock()

    async def complete(self, launch: Launch) -> Launch:
        """Return the launch with the folder of the job's unpacked code, or with the reason why it
        has none."""
        digest = digest_of(launch.job.code)
        try:
            if self._fetch is None or digest is None:
                raise NoCode(_NOT_ACCEPTED)
            async with self._alone:
                folder = await self._unpacked(digest, self._fetch)
            files = (name for name in os.listdir(folder) if name != _WHEEL)
            modules = {name.removesuffix(".py") for name in files}
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

    async def wheel(self, digest: str) -> bytes:
        """Return the wheel with that hash, which a job here has brought. Raises NoCode."""
        known = digest_of(stored_as(digest))
        try:
            if known is None:
                raise NoCode("code: that is no hash of a wheel")
            file = (self._folder or _default()) / known / _WHEEL
            return await asyncio.to_thread(file.read_bytes)
        except OSError as error:
            raise NoCode(f"code: {error.filename}: {error.strerror}") from error

    async def _unpacked(self, digest: str, fetch: Fetch) -> Path:
        """Return the folder of the unpacked code, fetching it if needed. Raises NoCode, OSError."""
        cache = self._folder or _default()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(cache)
        place = cache / digest
        if place.is_dir():
            os.utime(place)
            return place
        content = await fetch(digest)
        await asyncio.to_thread(self._unpack, content, digest, place)
        return place

    def _unpack(self, content: bytes, digest: str, place: Path) -> None:
        try:
            wheel = Wheel(content)
            if wheel.digest != digest:
                raise NoCode("code: what the master sent is not the job's wheel; submit it again")
            with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
                wheel.unpack(Path(temporary) / digest)
                (Path(temporary) / digest / _WHEEL).write_bytes(content)
                # Another agent of this user may have been faster.
                if not place.is_dir():
                    os.rename(Path(temporary) / digest, place)
        except ValueError as error:
            raise NoCode(f"code: {error}") from error
        for old in _by_use(place.parent)[_MOST_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def _default() -> Path:
    """Return the cache folder below the home. Raises NoCode if this user has none."""
    try:
        return below_home(FOLDER)
    except ValueError as error:
        raise NoCode(f"code: {error}") from error


def _by_use(folder: Path) -> list[Path]:
    """Return the folder's entries, the most recently used first."""
    return sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)


def _check_own(folder: Path) -> None:
    """Raise NoCode if others could put code there."""
    found = folder.lstat()
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others:
        raise NoCode(
            f"code: {folder} is not a folder that only the agent's user can write to; remove it on "
            "this node"
        )

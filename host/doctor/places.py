"""Folders and files of this host: whether they are usable, their free space and speed, and facts to
compare with other nodes.

Each place is examined by a thread of its own, since an unreachable file server may hold one for
ever. Reading is separate from concluding, so that the latter is a pure function.
"""

import glob
import hashlib
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from oobleck.core.orders import MARK, Finding, Level, Place, Seen
from oobleck.core.units import format_bytes
from oobleck.host.storage.folder import is_remote
from oobleck.host.system.files import open_regular

SHARED = ("checkpoints", "output")
#: Bytes written to measure the write rate, usually and while a job trains.
_WRITTEN_BYTES, _FEW_BYTES = 16 << 20, 256 << 10
_CHUNK_BYTES = 256 << 10
#: Number of small synced writes, like those of a journal.
_SYNCS = 5
#: Divisor of the free space that limits the bytes written.
_PART_OF_ROOM = 8
#: Most files that are listed, files that are read, and bytes read at begin and end of each.
_MOST_FILES, _READ_FILES, _READ_BYTES = 4096, 16, 64 << 10

#: File systems in memory, lost with the host; and those above a container's image, lost with the
#: container.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs"})
_LAYERED = frozenset({"overlay", "aufs"})
#: File systems whose fsync returns before the server has written.
_ELSEWHERE = frozenset({"9p", "fuse.sshfs", "vboxsf", "drvfs", "fuse.s3fs", "fuse.gcsfuse"})
#: Mount options with which fsync does not wait for the disk.
_HASTY = frozenset({"volatile", "nobarrier", "barrier=0", "async_commit", "journal_async_commit"})

#: File systems of a host's own disks. A pod that mounts a folder of one has a volume of its node
#: (hostPath, emptyDir, local). A volume that can move is a whole disk, or is on a file server.
_OF_DISKS = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"})
#: Set by kubelets in every container.
_IN_POD = "KUBERNETES_SERVICE_HOST"

_LITTLE_BYTES, _FEW_LEFT = 1 << 30, 1000
_NO_BYTES, _NONE_LEFT = 64 << 20, 10
#: Limits below which checkpoints, and writes of the journal, take long.
_SLOW_BYTES_PER_S = 50e6
_SLOW_SYNC_S = {"journal": 0.05}
_SLOW_SYNC_ELSE_S = 0.5


class PlaceFacts(msgspec.Struct, frozen=True, kw_only=True):
    place: Place
    #: The place itself, or its nearest ancestor that exists.
    at: str = ""
    #: Reason why it cannot be used, in the kernel's words; empty: it can be.
    problem: str = ""
    #: Type and options of the file system.
    system: str = ""
    options: tuple[str, ...] = ()
    #: Folder of that file system that a Kubernetes pod has mounted as its volume; empty: not a pod,
    #: or the whole file system.
    volume: str = ""
    free_bytes: int = 0
    #: None: it does not count files.
    free_files: int | None = None
    #: None: not measured.
    bytes_per_s: float | None = None
    sync_s: float | None = None
    #: Files of a data place.
    files: int = 0
    digest: str = ""


def look(
    place: Place, *, gently: bool, mark: str, sync: Callable[[int], None] = os.fsync
) -> PlaceFacts:
    """Examine a place. `mark`: name of the file to leave in a shared folder; empty: none. `sync`:
    flushes a file to the disk."""
    if is_remote(place.path):
        return PlaceFacts(place=place, system="remote")
    path = place.path.removeprefix("file://")
    try:
        if place.use == "data":
            return _look_at_data(place, path)
        return _look_at_folder(place, path, gently=gently, mark=mark, sync=sync)
    except OSError as error:
        return PlaceFacts(place=place, problem=(error.strerror or str(error)).lower())


def _nearest(path: str) -> Path:
    """Return `path`, or its nearest ancestor that exists. Raises OSError if not even its parent can
    be examined."""
    at = Path(os.path.abspath(path))
    while True:
        try:
            os.stat(at)
        except FileNotFoundError:
            at = at.parent
        else:
            return at


def _look_at_folder(
    place: Place, path: str, *, gently: bool, mark: str, sync: Callable[[int], None]
) -> PlaceFacts:
    at = _nearest(path)
    if at == Path("/") and path != "/":
        return PlaceFacts(place=place, problem="does not exist, nor any folder that it is in")
    if not at.is_dir():
        return PlaceFacts(place=place, at=str(at), problem="is no folder")
    room = os.statvfs(at)
    system, options, root = _file_system(at)
    facts = PlaceFacts(
        place=place,
        at=str(at),
        system=system,
        options=options,
        volume=root if root != "/" and _IN_POD in os.environ else "",
        free_bytes=room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room.f_files else None,
    )
    try:
        speeds = _write(at, facts.free_bytes, gently=gently, sync=sync)
        if mark and place.use in SHARED:
            flags = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(at / mark, flags, 0o600))
    except OSError as error:
        problem = f"cannot be written ({(error.strerror or str(error)).lower()})"
        return msgspec.structs.replace(facts, problem=problem)
    return msgspec.structs.replace(facts, bytes_per_s=speeds[0], sync_s=speeds[1])


def _write(
    at: Path, room: int, *, gently: bool, sync: Callable[[int], None]
) -> tuple[float | None, float]:
    """Return the disk's write rate in bytes a second (None if there is too little space or time),
    and the duration of a small synced write. Raises OSError."""
    size = min(_FEW_BYTES if gently else _WRITTEN_BYTES, room // _PART_OF_ROOM)
    path = at / f"{MARK}{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        chunk = secrets.token_bytes(_CHUNK_BYTES)
        began = time.monotonic()
        for written in range(0, size, _CHUNK_BYTES):
            os.write(descriptor, chunk[: size - written])
        sync(descriptor)
        took_s = time.monotonic() - began
        took = []
        for _ in range(_SYNCS):
            began = time.monotonic()
            os.write(descriptor, chunk[:512])
            sync(descriptor)
            took.append(time.monotonic() - began)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            path.unlink()
    rate = size / max(took_s, 1e-9) if size >= _WRITTEN_BYTES else None
    return rate, statistics.median(took)


def _file_system(
    at: Path, mounts: Path = Path("/proc/self/mountinfo")
) -> tuple[str, tuple[str, ...], str]:
    """Return type, options and mounted folder of the file system there (proc(5)); empty:
    unknown."""
    device = os.stat(at).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(at)
    found: list[tuple[bool, int, int, str, tuple[str, ...], str]] = []
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "", (), ""
    for place, line in enumerate(lines):
        before, _, after = line.partition(" - ")
        _, _, number, root, point, own, *_ = before.split()
        system, _, more = after.split(" ", 2)
        point, root = (
            text.encode("latin-1", "replace").decode("unicode_escape") for text in (point, root)
        )
        if real == point or real.startswith(point.rstrip("/") + "/"):
            options = (*own.split(","), *more.split(","))
            # Some have a device of their own for each folder; of several on one mount point the
            # last covers the others.
            found.append((number == wanted, len(point), place, system, options, root))
    return max(found)[3:] if found else ("", (), "")


def _look_at_data(place: Place, path: str) -> PlaceFacts:
    """Examine files or a pattern of data. Raises OSError."""
    if glob.has_magic(path):
        names = sorted(glob.glob(path, recursive=True))[:_MOST_FILES]
    elif os.path.isdir(path):
        names = sorted(_below(path))
    else:
        os.stat(path)
        names = [path]
    files = [name for name in names if os.path.isfile(name)]
    if not files:
        return PlaceFacts(place=place, problem="has no file in it")
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0{os.stat(name).st_size}\0".encode(errors="surrogateescape"))
    for name in _spread(files):
        _read_ends(name, digest.update)
    system, options, _ = _file_system(Path(files[0]))
    return PlaceFacts(
        place=place,
        at=path,
        system=system,
        options=options,
        files=len(files),
        digest=digest.hexdigest()[:32],
    )


def _below(path: str) -> Iterator[str]:
    found = 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            yield os.path.join(folder, name)
            found += 1
            if found >= _MOST_FILES:
                return


def _spread(files: Sequence[str]) -> Sequence[str]:
    """Return a sample of the files, spread evenly from the first to the last."""
    step = max(1, -(-len(files) // _READ_FILES))
    return files[::step]


def _read_ends(name: str, take: Callable[[bytes], None]) -> None:
    with open_regular(name) as file:
        take(file.read(_READ_BYTES))
        size = os.fstat(file.fileno()).st_size
        if size > _READ_BYTES:
            file.seek(max(_READ_BYTES, size - _READ_BYTES))
            take(file.read(_READ_BYTES))


def seen(facts: PlaceFacts) -> Seen:
    """Return the facts that are compared with other nodes' places."""
    return Seen(
        path=facts.place.path,
        use=facts.place.use,
        at="" if facts.problem else facts.at,
        digest=facts.digest,
        files=facts.files,
    )


# ---- mark files, which show whether nodes share a folder


def marks_in(folder: str, examination: str) -> tuple[str, ...]:
    """Return the names of the nodes whose marks of that examination are in the folder. Raises
    OSError."""
    start = f"{MARK}{examination}-"
    with os.scandir(folder) as entries:
        return tuple(
            sorted(e.name.removeprefix(start) for e in entries if e.name.startswith(start))
        )


def remove_marks(folder: str, examination: str, older_s: float) -> None:
    """Remove the marks of that examination, and all marks older than `older_s`."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(MARK):
                continue
            with suppress(OSError):
                ours = entry.name.startswith(f"{MARK}{examination}-")
                if ours or time.time() - entry.stat().st_mtime > older_s:
                    os.unlink(entry.path)


# ---- conclusions


def conclude(facts: PlaceFacts) -> Iterator[Finding]:
    path, use = facts.place.path, facts.place.use
    check = "data" if use == "data" else "folders"
    if facts.system == "remote":
        what = f"{path} is at a service, which is not examined"
        yield Finding(check=check, level="pass", what=what)
        return
    if facts.problem:
        where = f" (at {facts.at})" if facts.at not in ("", path) else ""
        fix = _FIXES[check] if use == "data" else _fix_of_problem(facts.problem)
        what = f"{path}{where}: {facts.problem}"
        yield Finding(check=check, level="fail", what=what, fix=fix)
        return
    if use == "data":
        what = f"{path}: {facts.files} files can be read"
        yield Finding(check=check, level="pass", what=what, figures={"files": float(facts.files)})
        return
    yield _of_room(facts)
    yield from _of_durability(facts)
    yield from _of_speed(facts)


_FIXES = {"data": "mount or copy the data there, as on the other nodes, and let the agent read it"}


def _fix_of_problem(problem: str) -> str:
    if "read-only" in problem:
        return "mount it for writing (a disk with errors becomes read-only: check dmesg)"
    if "permission" in problem or "not permitted" in problem:
        return "let the daemon's user write there (chown)"
    if "no space" in problem or "quota" in problem:
        return "make room there, or name another folder"
    return "mount it, or name another folder"


def _of_room(facts: PlaceFacts) -> Finding:
    path, left = facts.place.path, facts.free_files
    figures = {"free_bytes": float(facts.free_bytes)}
    what = f"{path} has room for {format_bytes(facts.free_bytes)}"
    few = left is not None and left < _FEW_LEFT
    if few:
        what += f" in {left} more files"
    level: Level = "pass"
    if facts.free_bytes < _NO_BYTES or (left is not None and left < _NONE_LEFT):
        level = "fail"
    elif facts.free_bytes < _LITTLE_BYTES or few:
        level = "warn"
    fix = "" if level == "pass" else "make room there (du -xh), or name another folder"
    return Finding(check="room", level=level, what=what, fix=fix, figures=figures)


def _of_durability(facts: PlaceFacts) -> Iterator[Finding]:
    """Report where writes may not survive a power failure or a restart."""
    if facts.place.use == "own":
        return
    path, system = facts.place.path, facts.system
    hasty = sorted(_HASTY & {*facts.options})
    if system in _IN_MEMORY:
        what = f"{path} is on {system}, in memory: gone when the host restarts"
    elif hasty:
        what = f"{path} is on {system} mounted with {', '.join(hasty)}, so fsync does not wait"
    elif system in _LAYERED:
        what = f"{path} is on {system}, in a container: gone when that is removed"
    elif system in _ELSEWHERE:
        what = f"{path} is on {system}, whose fsync may return before anything is on a disk"
    elif facts.volume and facts.place.use == "journal" and system in _OF_DISKS:
        what = (
            f"{path} is {facts.volume} on a disk of this pod's node: the pod cannot move to "
            "another node, and the head's state is lost with this one"
        )
        fix = "take a storage class whose volumes other nodes can mount, and run 'oobleck backup'"
        yield Finding(check="durable", level="warn", what=what, fix=fix)
        return
    else:
        return
    fix = "name a folder on a disk or a file server, or mount one there (a volume of the container)"
    yield Finding(check="durable", level="warn", what=what, fix=fix)


def _of_speed(facts: PlaceFacts) -> Iterator[Finding]:
    path, use = facts.place.path, facts.place.use
    if facts.sync_s is None:
        return
    figures = {"sync_s": facts.sync_s}
    what = f"{path}: a small write is on the disk in {1000 * facts.sync_s:.1f} ms"
    if facts.bytes_per_s is not None:
        figures["bytes_per_s"] = facts.bytes_per_s
        what += f", and it takes {facts.bytes_per_s / 1e6:,.0f} MB/s"
    slow = facts.bytes_per_s is not None and facts.bytes_per_s < _SLOW_BYTES_PER_S
    if slow or facts.sync_s > _SLOW_SYNC_S.get(use, _SLOW_SYNC_ELSE_S):
        waits = "the master waits for each" if use == "journal" else "checkpoints take long"
        fix = f"{waits}: name a folder on a faster disk, or end other writers there (iostat -x)"
        yield Finding(check="disk", level="slow", what=what, fix=fix, figures=figures)
    else:
        yield Finding(check="disk", level="pass", what=what, figures=figures)

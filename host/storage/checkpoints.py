"""Checkpoints in a folder: listing and verifying them, setting damaged ones aside, and removing old
ones.

Reads and removes; workers write. Must not know torch or the content of a layer's file.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from oobleck.core.checkpoint import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    MOST_RECORDS_BYTES,
    InvalidCheckpoint,
    LayerFile,
    Manifest,
    RecordsFile,
    read_manifest,
    step_of,
)
from oobleck.core.codec import decode, encode
from oobleck.host.storage.folder import Folder
from oobleck.host.system.files import WrongFile

#: File beside the manifest of a checkpoint that is set aside; searches for checkpoints skip that
#: one. The folder keeps its name, since object stores have no rename.
DAMAGED = "damaged.json"

_MOST_MARKED_FILES = 16
_MOST_MARK_CHARACTERS = 200
_MOST_MARK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """Checkpoint, by its folder's name."""

    name: str
    manifest: Manifest
    #: First 8 bytes of the manifest's SHA-256: the same number for all readers of it.
    identity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    #: Newest first.
    checkpoints: tuple[StoredCheckpoint, ...]
    #: Folders whose manifest cannot be read, or that are set aside, with reasons.
    damaged: dict[str, str]
    #: The set-aside ones among them; the mark beside the manifest lists the damage.
    set_aside: tuple[StoredCheckpoint, ...]
    #: Folders without a manifest: of saves under way, or of failed ones.
    torn: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Content of the file that sets a checkpoint aside."""

    #: Unix time.
    found: float
    #: By file; only some if there are many.
    problems: dict[str, str]

    def __str__(self) -> str:
        return "; ".join(f"{file}: {problem}" for file, problem in self.problems.items())


class LayerProblem(InvalidCheckpoint):
    """Error in the file of one layer."""

    def __init__(self, file: LayerFile, what: str) -> None:
        """Make the error. `what`: the fault, without the file's name."""
        super().__init__(f"{file.name}: {what}")
        self.layer = file.layer
        self.what = what


class Damaged(LayerProblem):
    """Error of a file that is missing, or whose content differs from what was written."""


class Unreadable(LayerProblem):
    """Error of a file that cannot be read here and now; elsewhere, or later, it may be whole."""


def list_checkpoints(folder: Folder) -> Listing:
    """List the checkpoints in the folder. Raises OSError if the folder itself cannot be read."""
    found, aside, damaged, torn = [], [], {}, []
    for name in folder.names():
        if step_of(name) is None:
            continue
        try:
            checkpoint = read_checkpoint(folder.below(name), name)
            mark = None if checkpoint is None else read_mark(folder.below(name))
        except InvalidCheckpoint as error:
            damaged[name] = str(error)
            continue
        except OSError as error:
            damaged[name] = f"{name}: {MANIFEST}: {error.strerror or error}"
            continue
        if checkpoint is None:
            torn.append(name)
        elif mark is not None:
            aside.append(checkpoint)
            damaged[name] = f"{name}: {mark}; it is set aside"
        else:
            found.append(checkpoint)
    for some in (found, aside):
        some.sort(key=lambda item: (item.manifest.step, item.manifest.created), reverse=True)
    return Listing(
        checkpoints=tuple(found), damaged=damaged, set_aside=tuple(aside), torn=tuple(torn)
    )


def read_checkpoint(folder: Folder, name: str) -> StoredCheckpoint | None:
    """Read `folder`'s manifest; None if there is none. Raises InvalidCheckpoint, OSError."""
    if not folder.exists(MANIFEST):
        return None
    text = folder.read(MANIFEST, most_bytes=MOST_MANIFEST_BYTES)
    manifest = read_manifest(text, name)
    digest = hashlib.sha256(text).digest()
    identity = int.from_bytes(digest[:8], "little", signed=True)
    return StoredCheckpoint(name=name, manifest=manifest, identity=identity)


def read_layer(folder: Folder, file: LayerFile) -> bytes:
    """Return the content of a layer's file, after checking its hash. Raises InvalidCheckpoint."""
    try:
        content = folder.read(file.name, most_bytes=file.bytes)
    except OSError as error:
        raise _unreadable(file, error) from error
    _check(file, len(content), hashlib.sha256(content).hexdigest())
    return content


def read_records(folder: Folder, file: RecordsFile) -> bytes:
    """Return the checked content of the file of records. Raises InvalidCheckpoint."""
    try:
        content = folder.read(file.name, most_bytes=MOST_RECORDS_BYTES)
    except OSError as error:
        raise InvalidCheckpoint(f"{file.name}: {error.strerror or error}") from error
    if len(content) != file.bytes:
        raise InvalidCheckpoint(f"{file.name}: has {len(content)} bytes, not {file.bytes}")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise InvalidCheckpoint(f"{file.name}: its content is not what was written (SHA-256)")
    return content


def verify(folder: Folder, manifest: Manifest) -> dict[str, LayerProblem]:
    """Return the files of a checkpoint that are damaged or unreadable, each with its problem."""
    found = {file.name: verify_layer(folder, file) for file in manifest.files}
    return {name: problem for name, problem in found.items() if problem is not None}


def verify_layer(folder: Folder, file: LayerFile) -> LayerProblem | None:
    """Compare a file with its manifest entry, part by part; None if it is as written."""
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in folder.chunks(file.name):
            digest.update(chunk)
            size += len(chunk)
            if size > file.bytes:
                raise Damaged(file, f"has more than {file.bytes} bytes")
        _check(file, size, digest.hexdigest())
    except OSError as error:
        return _unreadable(file, error)
    except Damaged as error:
        return error
    return None


def _unreadable(file: LayerFile, error: OSError) -> LayerProblem:
    """Convert an error of reading: Damaged for a missing or irregular file, which stays so, else
    Unreadable, as storage may fail for a moment."""
    lasts = isinstance(error, FileNotFoundError | WrongFile)
    kind = Damaged if lasts else Unreadable
    return kind(file, error.strerror or str(error))


def _check(file: LayerFile, size: int, sha256: str) -> None:
    if size != file.bytes:
        raise Damaged(file, f"has {size} bytes, not {file.bytes}")
    if sha256 != file.sha256:
        raise Damaged(file, "its content is not what was written (SHA-256)")


def prune(
    folder: Folder, *, keep: int, newest: str, is_own: Callable[[Manifest], bool], now: float
) -> None:
    """Remove all but the `keep` newest checkpoints of one training, of which `newest` was just
    published. Damaged ones go once `keep` whole ones were published after they were found.
    `is_own`: whether a checkpoint is of that training; `now`: Unix time. Raises OSError."""
    listing = list_checkpoints(folder)
    own = [c for c in listing.checkpoints if is_own(c.manifest)]
    others = [c for c in own if c.name != newest]
    others.sort(key=lambda checkpoint: checkpoint.manifest.created, reverse=True)
    for checkpoint in others[keep - 1 :]:
        _remove(folder, checkpoint.name)
    published = [now, *(checkpoint.manifest.created for checkpoint in others)]
    alone = len(own) == len(listing.checkpoints)  # else the owner of an unreadable one is unknown
    set_aside_own = {c.name for c in listing.set_aside if is_own(c.manifest)}
    for name in listing.damaged if alone else set_aside_own:
        mark = _mark_of(folder.below(name), name, now)
        if mark is not None and len(published) >= keep and published[keep - 1] > mark.found:
            _remove(folder, name)


def _mark_of(here: Folder, name: str, now: float) -> Mark | None:
    """Return a checkpoint's mark, if it has been set aside. Set one with an invalid manifest aside
    now; return None for one that cannot be read, since that may pass. Raises OSError."""
    try:
        read_checkpoint(here, name)
    except (InvalidCheckpoint, WrongFile) as error:
        if not here.exists(DAMAGED):
            set_aside(here, {MANIFEST: str(error)}, now)
    except OSError:
        return None
    return read_mark(here)


def _remove(folder: Folder, name: str) -> None:
    # The manifest first: a half-removed folder is no checkpoint.
    folder.remove(f"{name}/{MANIFEST}")
    folder.remove(name)


def sweep(folder: Folder, *, under_way: str, is_own: Callable[[Manifest], bool]) -> str:
    """Remove the remains of failed saves, except for the one that begins now. Where another
    training has checkpoints, which may be saving, remove nothing and return the name of one. Raises
    OSError."""
    listing = list_checkpoints(folder)
    if others := [c.name for c in listing.checkpoints if not is_own(c.manifest)]:
        return others[0]
    for name in listing.torn:
        if name != under_way:
            folder.remove(name)
    return ""


def set_aside(folder: Folder, problems: Mapping[str, str], now: float) -> None:
    """Set a checkpoint aside. `folder`: of the checkpoint; `now`: Unix time. Raises OSError."""
    some = islice(problems.items(), _MOST_MARKED_FILES)
    told = {file: problem[:_MOST_MARK_CHARACTERS] for file, problem in some}
    folder.write(DAMAGED, [encode(Mark(found=now, problems=told))])


def read_mark(folder: Folder) -> Mark | None:
    """Read the mark in `folder`; None if the checkpoint is not set aside. Raises OSError."""
    if not folder.exists(DAMAGED):
        return None
    try:
        return decode(Mark, folder.read(DAMAGED, most_bytes=_MOST_MARK_BYTES))
    except (ValueError, WrongFile):  # set aside by hand
        return Mark(found=0.0, problems={DAMAGED: "says so"})


def take_back(folder: Folder) -> None:
    """Undo `set_aside`, as the checkpoint in `folder` is whole. Raises OSError."""
    folder.remove(DAMAGED)

"""The checkpoints in a folder: which there are, whether they are whole, and removing old ones.

Reads and removes; workers write. Must not know torch or what is inside a layer's file.
"""

import hashlib
from dataclasses import dataclass

from oobleck.host.folder import Folder
from oobleck.planner.checkpoint import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    InvalidCheckpoint,
    LayerFile,
    Manifest,
    read_manifest,
    step_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint, by its folder's name."""

    name: str
    manifest: Manifest
    #: First 8 bytes of the manifest's SHA-256: the same number on all who see the same one.
    identity: int

    @property
    def age_order(self) -> tuple[int, float]:
        """Later is newer."""
        return self.manifest.step, self.manifest.created


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    #: Newest first.
    checkpoints: tuple[Found, ...]
    #: Folders whose manifest cannot be read, and why.
    damaged: dict[str, str]
    #: Folders without a manifest: of saves under way, or that came to nothing.
    torn: tuple[str, ...]


def list_checkpoints(folder: Folder) -> Listing:
    """Raises OSError where the folder itself cannot be read."""
    found, damaged, torn = [], {}, []
    for name in folder.names():
        if step_of(name) is None:
            continue
        try:
            checkpoint = read_checkpoint(folder.below(name), name)
        except InvalidCheckpoint as error:
            damaged[name] = str(error)
            continue
        except OSError as error:
            damaged[name] = f"{name}: {MANIFEST}: {error.strerror or error}"
            continue
        if checkpoint is None:
            torn.append(name)
        else:
            found.append(checkpoint)
    found.sort(key=lambda item: item.age_order, reverse=True)
    return Listing(checkpoints=tuple(found), damaged=damaged, torn=tuple(torn))


def read_checkpoint(folder: Folder, name: str) -> Found | None:
    """What `folder`'s manifest says; None: none is there. Raises InvalidCheckpoint, OSError."""
    if not folder.exists(MANIFEST):
        return None
    text = folder.read(MANIFEST, most_bytes=MOST_MANIFEST_BYTES)
    manifest = read_manifest(text, name)
    digest = hashlib.sha256(text).digest()
    identity = int.from_bytes(digest[:8], "little", signed=True)
    return Found(name=name, manifest=manifest, identity=identity)


def read_layer(folder: Folder, file: LayerFile) -> bytes:
    """The content of a layer's file, after its hash was found right. Raises InvalidCheckpoint."""
    try:
        content = folder.read(file.name, most_bytes=file.bytes)
    except OSError as error:
        raise InvalidCheckpoint(f"{file.name}: {error.strerror or error}") from error
    _check(file, len(content), hashlib.sha256(content).hexdigest())
    return content


def verify(folder: Folder, manifest: Manifest) -> dict[str, str]:
    """Which files of a checkpoint are damaged, and how."""
    bad = {}
    for file in manifest.files:
        digest, size = hashlib.sha256(), 0
        try:
            for chunk in folder.chunks(file.name):
                digest.update(chunk)
                size += len(chunk)
                if size > file.bytes:
                    raise InvalidCheckpoint(f"{file.name}: has more than {file.bytes} bytes")
            _check(file, size, digest.hexdigest())
        except OSError as error:
            bad[file.name] = str(error.strerror or error)
        except InvalidCheckpoint as error:
            bad[file.name] = str(error).partition(": ")[2]
    return bad


def _check(file: LayerFile, size: int, sha256: str) -> None:
    if size != file.bytes:
        raise InvalidCheckpoint(f"{file.name}: has {size} bytes, not {file.bytes}")
    if sha256 != file.sha256:
        raise InvalidCheckpoint(f"{file.name}: its content is not what was written (SHA-256)")


def prune(folder: Folder, *, keep: int, newest: str) -> None:
    """Remove all but the `keep` newest checkpoints, of which `newest` is one. Raises OSError.

    To be called by who has just published `newest`, while nothing else is saved there.
    """
    others = [c for c in list_checkpoints(folder).checkpoints if c.name != newest]
    others.sort(key=lambda checkpoint: checkpoint.manifest.created, reverse=True)
    for checkpoint in others[keep - 1 :]:
        # The manifest first: what is half removed is no checkpoint.
        folder.remove(f"{checkpoint.name}/{MANIFEST}")
        folder.remove(checkpoint.name)


def sweep(folder: Folder, *, under_way: str) -> None:
    """Remove what is left of saves that came to nothing, but for the one that begins now. Raises
    OSError."""
    for name in list_checkpoints(folder).torn:
        if name != under_way:
            folder.remove(name)

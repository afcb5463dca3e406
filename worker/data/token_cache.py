"""Cache of tokenised text: a directory of token files, one set per node.

A file's key is a digest of all that its tokens depend on (texts, tokenizer, separator), so a cached
file is never stale. If several workers want the same file, the first one writes it and the others
wait. A file appears when it is complete.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from oobleck.core.job.spec import DataSpec
from oobleck.host.data.token_file import DataError, TokenFileInfo, TokenWriter, narrowest, read_info
from oobleck.host.data.tokenise import tokenise
from oobleck.host.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)

#: Default directory; in the home of the user that runs the workers.
DEFAULT_DIRECTORY = "~/.cache/oobleck/tokens"

#: Increased whenever the same texts and tokenizer give other tokens.
_FORMAT = 1
_TELL_EVERY_S = 10.0


def cached_tokens(
    spec: DataSpec, paths: Sequence[str], digest: bytes, tokenizer: Tokenizer
) -> tuple[str, TokenFileInfo]:
    """Return the token file of the texts in `paths`; write it first if needed. Raise DataError.

    `digest`: digest over the names, sizes and content of `paths`.
    """
    separator = tokenizer.separator(spec.separator)
    changed = [os.stat(path).st_mtime_ns for path in paths]
    made_of = (_FORMAT, digest.hex(), changed, tokenizer.sha256, separator, spec.field)
    key = hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:32]
    directory = _directory(spec)
    target = directory / f"{key}.tokens"
    with _alone(directory / f"{key}.lock"):
        if (info := _whole(target)) is not None:
            return str(target), info
        # One name per host, so that the remains of a killed worker are overwritten. Hosts that
        # share the directory but not its locks write separate files.
        temporary = f".{key}.{os.uname().nodename}.making"
        with TokenWriter(target, narrowest(tokenizer.vocabulary), temporary) as writer:
            info = tokenise(
                paths,
                tokenizer,
                writer,
                field=spec.field,
                separator=separator,
                report=_Telling(paths),
            )
    log.info("tokenised", extra={"tokens": info.tokens, "file": str(target)})
    return str(target), info


def _directory(spec: DataSpec) -> Path:
    try:
        return Path(spec.cache or DEFAULT_DIRECTORY).expanduser()
    except RuntimeError as error:
        raise DataError(
            f"cannot keep tokens in {DEFAULT_DIRECTORY}: this node's workers run as a user "
            "without a home directory; set cache to a directory that they may write to"
        ) from error


def _whole(target: Path) -> TokenFileInfo | None:
    try:
        return read_info(target)
    except DataError as error:  # truncated by another program: written again
        log.warning("invalid file in the token cache", extra={"reason": str(error)})
        return None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock on `path` during the block; no other process holds it meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise DataError(
            f"cannot keep tokens in {path.parent}: {error.strerror}; set cache to a directory "
            "that workers may write to"
        ) from error
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)  # which unlocks it; the kernel does so for a process that dies


def _lock(descriptor: int, path: Path) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for the worker that tokenises", extra={"lock": str(path)})
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems do not support locks
        raise DataError(
            f"cannot lock {path}: {error.strerror}; set cache to a directory on a local disk"
        ) from error


class _Telling:
    """Progress log of tokenising a large corpus."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._total = sum(os.path.getsize(path) for path in paths)
        self._next = time.monotonic() + _TELL_EVERY_S

    def __call__(self, read: int, written: int) -> None:
        if time.monotonic() >= self._next:
            self._next += _TELL_EVERY_S
            log.info("tokenising", extra={"read": read, "of": self._total, "tokens": written})

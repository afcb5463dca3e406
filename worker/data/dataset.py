"""Training data of tokens: a corpus of files on this node, and the rows of it that a step uses.

The corpus is the files as one sequence of token ids. Text is tokenised once per node, into the
cache; bytes are read from the text itself. Ids are read on demand: a corpus may
exceed memory, and a file that shrinks meanwhile causes an error rather than SIGBUS.

A row is `sequence_length` + 1 tokens: inputs and, shifted by one, targets. The corpus is cut into
such windows, which overlap by one token. `Order` decides which of them a step uses. Documents are
packed: attention spans the whole window, as is usual for GPT.
"""

import fcntl
import glob
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from oobleck.core.job.spec import DataSpec
from oobleck.host.display import inline
from oobleck.host.system.files import open_regular
from oobleck.host.token_file import (
    DataError,
    TokenFileInfo,
    TokenWriter,
    beyond_vocabulary,
    narrowest,
    read_info,
    type_of,
)
from oobleck.host.tokenise import Tokenizer, is_plain, load_tokenizer, tokenise
from oobleck.worker.data.objective import Order

Ids = NDArray[np.unsignedinteger]

#: A file's digest covers this many blocks, evenly spaced; all of a file of up to 256 KiB.
_DIGEST_BLOCKS = 64
_BLOCK_BYTES = 4096
#: Largest corpus that is scanned at the start for ids beyond the vocabulary; this takes a fraction
#: of a second. Larger ones are checked as they are read.
_SCAN_BYTES = 1 << 28
_SCAN_TOKENS = 1 << 21


class Corpus:
    """Tokens of a job, as every worker sees them."""

    def __init__(self, spec: DataSpec, vocabulary: int, key: str = "data") -> None:
        """Open the files of `spec`. `key`: its key in the job file. Raise DataError."""
        self._vocabulary = vocabulary
        self._key = key
        with _about(key):
            info = self._open_text(spec) if spec.tokens is None else self._open_tokens(spec)
            sizes = [_size(path) for path in self._paths]
            #: Byte offset in the corpus at which each file ends.
            self._ends = list(accumulate(sizes))
            if self._ends[-1] % self._dtype.itemsize:
                raise DataError(
                    f"{spec.tokens} has {self._ends[-1]} bytes, not a whole number of "
                    f"{self._dtype.name} tokens; set {key}.dtype to the type in the file"
                )
        self.tokens = self._ends[-1] // self._dtype.itemsize
        #: SHA-256 over the files' names, sizes and content; equal on nodes with equal data.
        self.fingerprint = self._digest(sizes, named="" if info is None else info.sha256)
        #: Information file beside the tokens; its highest id may be too low.
        self._info = info
        if self._ends[-1] <= _SCAN_BYTES:
            self._scan()

    def _open_tokens(self, spec: DataSpec) -> TokenFileInfo | None:
        assert spec.tokens is not None, "only called for a token file"
        self._paths = [spec.tokens]
        _size(spec.tokens)
        info = read_info(spec.tokens)
        width = np.dtype(type_of(spec.tokens, info, spec.dtype)).itemsize
        if info is not None:
            info.check_vocabulary(self._vocabulary, spec.tokens)
        self._dtype = np.dtype(f"<u{width}")
        return info

    def _open_text(self, spec: DataSpec) -> TokenFileInfo | None:
        self._paths = expand(spec.text)
        self._dtype = np.dtype(np.uint8)
        if spec.tokenizer is None and not spec.separator and all(map(is_plain, self._paths)):
            return None
        tokenizer = load_tokenizer(spec.tokenizer)
        tokenizer.check_vocabulary(self._vocabulary)
        sizes = [_size(path) for path in self._paths]
        path, info = cached_tokens(spec, self._paths, self._digest(sizes), tokenizer)
        self._paths = [path]
        self._dtype = np.dtype(f"<u{info.width}")
        return info

    def read(self, start: int, count: int) -> Ids:
        """Return tokens `start` to `start` + `count` - 1. Raise DataError if one is too high."""
        width = self._dtype.itemsize
        with _about(self._key):
            raw = self._read(start * width, count * width)
            tokens = np.frombuffer(raw, dtype=self._dtype)
            highest = int(tokens.max(initial=0))
            if self._info is not None and highest > self._info.highest:
                self._info.check_token(highest, self._place(start + int(tokens.argmax())))
            if highest >= self._vocabulary:
                where = self._place(start + int(tokens.argmax()))
                raise beyond_vocabulary(where, tokens, self._vocabulary, f"{self._key}.dtype")
        return tokens

    def _read(self, start: int, count: int) -> bytes:
        """Read `count` bytes of the corpus from `start`, across file boundaries."""
        parts = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while count:
            begin = self._ends[index - 1] if index else 0
            take = min(count, self._ends[index] - start)
            if take:
                parts.append(_read_file(self._paths[index], start - begin, take))
            start, count, index = start + take, count - take, index + 1
        return b"".join(parts)

    def _place(self, token: int) -> str:
        offset = token * self._dtype.itemsize
        index = int(np.searchsorted(self._ends, offset, side="right"))
        begin = self._ends[index - 1] if index else 0
        return f"position {(offset - begin) // self._dtype.itemsize} of {self._paths[index]}"

    def _scan(self) -> None:
        if self._info is None and self._vocabulary > np.iinfo(self._dtype).max:
            return
        for start in range(0, self.tokens, _SCAN_TOKENS):
            self.read(start, min(_SCAN_TOKENS, self.tokens - start))

    def _digest(self, sizes: Sequence[int], named: str = "") -> bytes:
        """Return SHA-256 over names (`named` instead, if given), sizes and part of the content."""
        digest = hashlib.sha256()
        for path, size in zip(self._paths, sizes, strict=True):
            # A name may be bytes that are not valid text.
            digest.update(os.fsencode(f"{named or os.path.basename(path)}\0{size}\0"))
            for offset, count in _digest_extents(size):
                digest.update(_read_file(path, offset, count))
        return digest.digest()


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Add the job file's `key` to errors, and make their file names printable."""
    try:
        yield
    except DataError as error:
        raise DataError(inline(f"{key}: {error}")) from error


def expand(patterns: Sequence[str]) -> list[str]:
    """Return the files that match any of `patterns`, sorted by path, each once.

    Raise DataError for a pattern without a file.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            where = "" if os.path.isabs(pattern) else f" from {os.getcwd()}"
            what = f"no file matches {pattern!r}{where} on this machine"
            if others := sorted(path for path in matches if not os.path.isdir(path)):
                what = f"{others[0]} is not a regular file"
            elif matches:
                what = f"only directories match {pattern!r}{where} on this machine"
            raise DataError(
                f"{what}; correct the pattern in text (as in /texts/**/*.txt) or put the files "
                "there, the same on all nodes"
            )
        found.update(files)
    return sorted(found)


def _size(path: str) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path} is not a regular file; put a file there, the same on all nodes")
    return found.st_size


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        f"cannot read {path}: {error.strerror}; put the file there, readable, the same on all nodes"
    )


def _read_file(path: str, offset: int, count: int) -> bytes:
    try:
        with open_regular(path, buffering=0) as file:
            file.seek(offset)
            raw = file.read(count)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) != count:
        raise DataError(
            f"{path} has become shorter since the job began; training data must not change"
        )
    return raw


def _digest_extents(size: int) -> Iterable[tuple[int, int]]:
    """Return offset and length of the parts of a `size`-byte file that its digest covers."""
    blocks = -(-size // _BLOCK_BYTES)
    if blocks <= _DIGEST_BLOCKS:
        return [(0, size)] if size else []
    spaced = (
        i * (blocks - 1) // (_DIGEST_BLOCKS - 1) * _BLOCK_BYTES for i in range(_DIGEST_BLOCKS)
    )
    return ((offset, min(_BLOCK_BYTES, size - offset)) for offset in spaced)


Tokens = NDArray[np.int64]


def row_digest(row: Tokens) -> bytes:
    """Return SHA-256 of a row's tokens as little-endian 32-bit integers."""
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()


def samples_digest(row_digests: Iterable[bytes]) -> str:
    """Return a step's digest: SHA-256 (hex) over its rows' digests in global sample order."""
    return hashlib.sha256(b"".join(row_digests)).hexdigest()


class Dataset:
    """Windows of a job's corpus, as every worker sees them."""

    def __init__(
        self,
        spec: DataSpec,
        sequence_length: int,
        vocabulary: int,
        *,
        held_out: float = 0.0,
        key: str = "data",
    ) -> None:
        """Open the corpus of `spec`.

        `held_out`: share of the windows, at least one, that are not for training. `key`: key of
        `spec` in the job file. Raise DataError.
        """
        self._length = sequence_length
        self._corpus = Corpus(spec, vocabulary, key)
        tokens = self._corpus.tokens
        if tokens <= sequence_length:
            what = spec.tokens if spec.tokens is not None else ", ".join(spec.text)
            raise DataError(
                f"{key}: {what} holds {tokens} tokens, too few for one row of "
                f"{sequence_length + 1}; give more text or lower model.sequence_length"
            )
        self.order = Order.of((tokens - 1) // sequence_length, held_out)
        if held_out < 1.0 and not self.order.trained:
            raise DataError(
                f"{key}: has {self.order.samples} rows of {sequence_length + 1} tokens, too few to "
                f"hold out a share of {held_out} and train on the others; give more text or lower "
                "model.sequence_length"
            )
        #: 32 bytes; nodes with equal ones train on the same windows of equal data.
        self.fingerprint = self._corpus.fingerprint
        if self.order.held_out:
            split = self.fingerprint + self.order.held_out.to_bytes(8, "little")
            self.fingerprint = hashlib.sha256(split).digest()

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Tokens:
        """Return rows (n, sequence_length + 1) of `step` (from 1) at `positions` of its batch."""
        return self._windows(self.order.of_step(seed, step, positions, global_batch))

    def held_out_rows(self, positions: Sequence[int]) -> Tokens:
        """Return the held-out rows (n, sequence_length + 1) at `positions` among those held out."""
        return self._windows(self.order.of_held_out(positions))

    def _windows(self, windows: NDArray[np.uint64]) -> Tokens:
        rows = [
            self._corpus.read(int(window) * self._length, self._length + 1) for window in windows
        ]
        if not rows:
            return np.empty((0, self._length + 1), dtype=np.int64)
        return np.stack(rows).astype(np.int64)


# ---- Cache of tokenised text: a directory of token files, one set per node.
#
# A file's key is a digest of all that its tokens depend on (texts, tokenizer, separator), so a
# cached file is never stale. If several workers want the same file, the first one writes it and
# the others wait. A file appears when it is complete.


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
                report=_ProgressLog(paths),
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


class _ProgressLog:
    """Progress log of tokenising a large corpus."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._total = sum(os.path.getsize(path) for path in paths)
        self._next = time.monotonic() + _TELL_EVERY_S

    def __call__(self, read: int, written: int) -> None:
        if time.monotonic() >= self._next:
            self._next += _TELL_EVERY_S
            log.info("tokenising", extra={"read": read, "of": self._total, "tokens": written})

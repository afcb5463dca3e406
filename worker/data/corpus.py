"""The corpus of a job on this node: its files, as one row of token ids.

Owns which files these are, their type, and reading them. Text is tokenised once per node, into the
cache (`token_cache`); bytes are read from the text itself. Ids are read when they are needed: a
corpus may be larger than memory, and a file that shrinks meanwhile is an error, no SIGBUS.
"""

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from oobleck.core.job.spec import DataSpec
from oobleck.host.data.documents import is_plain
from oobleck.host.data.token_file import (
    DataError,
    TokenFileInfo,
    beyond_vocabulary,
    read_info,
    type_of,
)
from oobleck.host.data.tokenizer import load_tokenizer
from oobleck.host.display import inline
from oobleck.host.system.files import open_regular
from oobleck.worker.data.token_cache import cached_tokens

Ids = NDArray[np.unsignedinteger]

#: A file's digest covers this many blocks, evenly spaced; all of a file of up to 256 KiB.
_DIGEST_BLOCKS = 64
_BLOCK_BYTES = 4096
#: Corpora of so many bytes are looked through at the start for ids beyond the vocabulary, which
#: takes a fraction of a second; larger ones when they are used.
_SCAN_BYTES = 1 << 28
_SCAN_TOKENS = 1 << 21


class Corpus:
    """The tokens of a job, as every worker sees them."""

    def __init__(self, spec: DataSpec, vocabulary: int, key: str = "data") -> None:
        """`key`: what the job file calls `spec`. Raises DataError."""
        self._vocabulary = vocabulary
        self._key = key
        with _about(key):
            info = self._open_text(spec) if spec.tokens is None else self._open_tokens(spec)
            sizes = [_size(path) for path in self._paths]
            #: Byte offset in the corpus at which each file ends.
            self._ends = list(accumulate(sizes))
            if self._ends[-1] % self._dtype.itemsize:
                raise DataError(
                    f"{spec.tokens} has {self._ends[-1]} bytes, no whole number of "
                    f"{self._dtype.name} tokens; set {key}.dtype to what the file holds"
                )
        self.tokens = self._ends[-1] // self._dtype.itemsize
        #: SHA-256 over the files' names, sizes and content; equal on nodes with equal data.
        self.fingerprint = self._digest(sizes, named="" if info is None else info.sha256)
        #: What stands beside the tokens; it may say less than is in them.
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
        """Tokens `start` to `start` + `count` - 1; raises DataError where one is too high."""
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
        """`count` bytes of the corpus from `start`, over the ends of files."""
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
        """Over names (`named` instead where it is given), sizes and a part of the content."""
        digest = hashlib.sha256()
        for path, size in zip(self._paths, sizes, strict=True):
            # A name may be bytes that are no text.
            digest.update(os.fsencode(f"{named or os.path.basename(path)}\0{size}\0"))
            for offset, count in _digest_extents(size):
                digest.update(_read_file(path, offset, count))
        return digest.digest()


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Errors name the key of the job file, and files by names that a message can carry."""
    try:
        yield
    except DataError as error:
        raise DataError(inline(f"{key}: {error}")) from error


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that match any of `patterns`, in their order: sorted by path, each once. Raises
    DataError for a pattern without a file."""
    found: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            where = "" if os.path.isabs(pattern) else f" from {os.getcwd()}"
            what = f"no file matches {pattern!r}{where} on this node"
            if others := sorted(path for path in matches if not os.path.isdir(path)):
                what = f"{others[0]} is not a regular file"
            elif matches:
                what = f"only directories match {pattern!r}{where} on this node"
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
    """Offset and length of the pieces of a file of `size` bytes that its digest covers."""
    blocks = -(-size // _BLOCK_BYTES)
    if blocks <= _DIGEST_BLOCKS:
        return [(0, size)] if size else []
    spaced = (
        i * (blocks - 1) // (_DIGEST_BLOCKS - 1) * _BLOCK_BYTES for i in range(_DIGEST_BLOCKS)
    )
    return ((offset, min(_BLOCK_BYTES, size - offset)) for offset in spaced)

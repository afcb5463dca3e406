"""Training data: which token rows a step uses, and reading them.

A row is `sequence_length` + 1 tokens: inputs and, moved by one, targets. The corpus is cut into
such windows, one token overlapping, and every epoch goes through all of them in an order that is a
stateless permutation of (seed, epoch), so that any worker finds any sample of any step by itself.

Bytes are read when they are needed and cached by the kernel only: a corpus may be larger than
memory, and a file that shrinks under a running job is an error instead of a SIGBUS.
"""

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.job import DataSpec
from oobleck.worker.random import derive

Tokens = NDArray[np.int64]

#: A file's digest covers this many blocks, evenly spaced; all of a file of up to 256 KiB.
_DIGEST_BLOCKS = 64
_BLOCK_BYTES = 4096
_FEISTEL_ROUNDS = 6


class DataError(ValueError):
    """The data cannot be used as the job says; the text names the pattern and the fix."""


def row_digest(row: Tokens) -> bytes:
    """SHA-256 of a row's tokens as little-endian 32-bit integers."""
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()


def samples_digest(row_digests: Iterable[bytes]) -> str:
    """A step's digest: SHA-256 (hex) over its rows' digests in global sample order."""
    return hashlib.sha256(b"".join(row_digests)).hexdigest()


def permute(values: NDArray[np.uint64], size: int, *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Where a shuffle of range(`size`) that (seed, epoch) names puts each of `values`.

    A Feistel network permutes the next power of four; values that fall outside of `size` walk on
    through it until they are inside (Black and Rogaway 2002), less than four rounds on average.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(seed, "order", epoch, i)) for i in range(_FEISTEL_ROUNDS)]
    out = values.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= np.uint64(size)]
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Dataset:
    """The corpus of a job, as every worker sees it."""

    def __init__(self, spec: DataSpec, sequence_length: int, vocabulary: int) -> None:
        self._length = sequence_length
        self._vocabulary = vocabulary
        self._dtype = np.dtype(np.uint8 if spec.tokens is None else f"<u{_width(spec.dtype)}")
        self._paths = _expand(spec)
        sizes = [_size(path) for path in self._paths]
        #: Byte offset in the corpus at which each file ends.
        self._ends = list(accumulate(sizes))
        tokens = self._ends[-1] // self._dtype.itemsize
        if tokens <= sequence_length:
            raise DataError(
                f"data: {_describe(spec)} holds {tokens} tokens, too few for one row of "
                f"{sequence_length + 1}; give more text or lower model.sequence_length"
            )
        if spec.tokens is not None and self._ends[-1] % self._dtype.itemsize:
            raise DataError(
                f"data.tokens: {spec.tokens} has {self._ends[-1]} bytes, no whole number of "
                f"{spec.dtype} tokens; set data.dtype to what the file holds"
            )
        self.windows = (tokens - 1) // sequence_length
        #: SHA-256 over the files' names, sizes and content; equal on nodes with equal data.
        self.fingerprint = self._digest(sizes)

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Tokens:
        """The rows (n, sequence_length + 1) of step `step` (from 1) at `positions` of its batch."""
        samples = (step - 1) * global_batch + np.asarray(positions, dtype=np.int64)
        windows = np.empty(len(samples), dtype=np.uint64)
        epochs, order = np.divmod(samples, self.windows)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(
                order[chosen].astype(np.uint64), self.windows, seed=seed, epoch=int(epoch)
            )
        rows = [self._window(int(window)) for window in windows]
        return np.stack(rows) if rows else np.empty((0, self._length + 1), dtype=np.int64)

    def _window(self, window: int) -> Tokens:
        width = self._dtype.itemsize
        raw = self._read(window * self._length * width, (self._length + 1) * width)
        return self._decode(raw, f"at token {window * self._length}").astype(np.int64)

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

    def _decode(self, raw: bytes, where: str) -> NDArray[np.unsignedinteger]:
        tokens = np.frombuffer(raw, dtype=self._dtype)
        highest = int(tokens.max(initial=0))
        if highest >= self._vocabulary:
            raise DataError(
                f"data: token {highest} {where} is not below model.vocabulary "
                f"({self._vocabulary}); set model.vocabulary to more than the highest token"
            )
        return tokens

    def _digest(self, sizes: Sequence[int]) -> bytes:
        digest = hashlib.sha256()
        for path, size in zip(self._paths, sizes, strict=True):
            digest.update(f"{os.path.basename(path)}\0{size}\0".encode())
            for offset, count in _digest_extents(size):
                raw = _read_file(path, offset, count)
                self._decode(raw, f"in {path}")
                digest.update(raw)
        return digest.digest()


def _width(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _describe(spec: DataSpec) -> str:
    return spec.tokens if spec.tokens is not None else ", ".join(spec.text)


def _expand(spec: DataSpec) -> list[str]:
    """The files of the corpus in their order: sorted by path, each once."""
    if spec.tokens is not None:
        return [spec.tokens]
    found: set[str] = set()
    for pattern in spec.text:
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
                f"data.text: {what}; correct the pattern (as in "
                "/texts/**/*.txt) or put the files there, the same on all nodes"
            )
        found.update(files)
    return sorted(found)


def _size(path: str) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"data: {path} is not a regular file; put a file there, the same on all nodes"
        )
    return found.st_size


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(
        f"data: cannot read {path}: {error.strerror}; put the file there, readable, "
        "the same on all nodes"
    )


def _read_file(path: str, offset: int, count: int) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            raw = file.read(count)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(raw) != count:
        raise DataError(
            f"data: {path} has become shorter since the job began; training data must not change"
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
